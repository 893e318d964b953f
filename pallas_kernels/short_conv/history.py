"""What a row carries from piece to piece: the last W - 1 inputs of its last document."""

import jax
import jax.numpy as jnp


def prepend(
    x: jax.Array, state: jax.Array, segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Puts `state` [B, W-1, C] right before each row's first document.

    Returns x and ids over W - 1 + T places; the row's tokens are the last T. With left padding the
    history takes the place of the padding next to the document.
    """
    H = state.shape[1]
    longer = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    if segment_ids is None:
        return longer, None
    start, first_id = _first(segment_ids)
    ids = jnp.pad(segment_ids, ((0, 0), (H, 0)))
    # Token t is place H + t, so the history of a document that starts at s is places s..s+H-1.
    place = jnp.arange(longer.shape[1]) - start[:, None]
    held = (place >= 0) & (place < H) & (first_id[:, None] > 0)
    past = _rows(state, jnp.clip(place, 0, H - 1)).astype(x.dtype)
    longer = jnp.where(held[..., None], past, longer)
    return longer, jnp.where(held, first_id[:, None], ids)


def carry(
    x: jax.Array, width: int, state: jax.Array | None, segment_ids: jax.Array | None
) -> jax.Array:
    """The state after x: [B, width, C], oldest first, zeros where the document is shorter.

    A row without tokens keeps `state` (zeros when None).
    """
    B, T, C = x.shape
    if state is None:
        state = jnp.zeros_like(x, shape=(B, width, C))
    if width == 0:
        return state
    if segment_ids is None:
        whole = jnp.concatenate([state.astype(x.dtype), x], axis=1)
        return whole[:, T:].astype(state.dtype)
    start, first_id = _first(segment_ids)
    last = T - 1 - jnp.argmax(segment_ids[:, ::-1] != 0, axis=1)
    last_id = jnp.take_along_axis(segment_ids, last[:, None], axis=1)
    token = last[:, None] - (width - 1) + jnp.arange(width)  # [B, width]
    inside = (token >= 0) & (_rows(segment_ids, jnp.maximum(token, 0)) == last_id)
    # Before the first document lies the state it continues; before any other lies nothing.
    before = (token < start[:, None]) & (last_id == first_id[:, None])
    past = _rows(state, jnp.clip(width + token - start[:, None], 0, width - 1))
    recent = _rows(x, jnp.maximum(token, 0)).astype(state.dtype)
    carried = jnp.where(inside[..., None], recent, jnp.where(before[..., None], past, 0))
    return jnp.where((first_id > 0)[:, None, None], carried, state)


def _first(segment_ids):
    """Start and id of each row's first document, [B] each; (0, 0) in a row without tokens."""
    start = jnp.argmax(segment_ids != 0, axis=1)
    return start, jnp.take_along_axis(segment_ids, start[:, None], axis=1)[:, 0]


def _rows(table, index):
    """table [B, N, ...] at index [B, M] -> [B, M, ...]."""
    index = index.reshape(*index.shape, *(1,) * (table.ndim - 2))
    return jnp.take_along_axis(table, index, axis=1)

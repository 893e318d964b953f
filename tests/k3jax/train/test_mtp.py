"""Multi-token prediction: its loss by hand in float64, documents, gradients, and what it leaves."""

import dataclasses

import jax
import numpy as np
import pytest
from small_runs import MODEL, largest_error

from k3jax.models.kimi_k3 import depth, model
from k3jax.models.kimi_k3.loss import forward_sums, nll_sum, total_weight, two_ahead
from k3jax.models.kimi_k3.model import KimiK3
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.parallel import specs
from k3jax.parallel.mesh import MeshConfig, make_mesh
from k3jax.train.state import create_state
from k3jax.train.step import run_optimizer, train_step

# The least backbone: the layer in question has all that matters here.
CFG = dataclasses.replace(
    MODEL, mtp_layers=1, vocab_size=40, num_layers=1, mla_layers=(0,), remat=False
)
PLAIN = dataclasses.replace(CFG, mtp_layers=0)
MIXED = dataclasses.replace(MODEL, mtp_layers=1, num_layers=3, mla_layers=(2,))
T = 16

# A layer and a loss in float32 against float64: some hundred roundings of 6e-8.
HAND = 1e-5
# float32 sums in another order.
REORDERED = 1e-5
GRADIENT = 1e-4


@pytest.fixture(scope="module")
def variables(draw):
    return draw(CFG)


def batch_of(*documents, cut=False):
    """One row [1, T] of documents; with `cut` the last one goes on in a row that is not here."""
    batch = {n: np.zeros((1, T), np.int32) for n in ("tokens", "targets", "segment_ids")}
    batch["weights"] = np.zeros((1, T), np.float32)
    start = 0
    for number, ids in enumerate(documents):
        for i, token in enumerate(ids):
            at = start + i
            if at == T:
                break
            batch["tokens"][0, at], batch["segment_ids"][0, at] = token, number + 1
            if i + 1 < len(ids):
                batch["targets"][0, at], batch["weights"][0, at] = ids[i + 1], 1.0
        start += len(ids)
    assert start <= T or cut
    return batch


def documents(rng, *lengths):
    return [rng.integers(0, CFG.vocab_size, n) for n in lengths]


@pytest.fixture(scope="module")
def run(variables):
    """batch [1, T] -> ((main nll, (nll two ahead, statistics)), gradient of the latter nll)."""

    def ahead(params, batch):
        sums = forward_sums(CFG, params, variables["router"], batch, train=True)
        return sums.mtp_nll, sums

    compiled = jax.jit(jax.value_and_grad(ahead, has_aux=True))
    return lambda batch: compiled(variables["params"], batch)


def rms(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def situ(both):
    gate, up = both[..., 0, :], both[..., 1, :]
    return 4.0 * np.tanh(gate / 4.0) * sigmoid(gate) * 25.0 * np.tanh(up / 25.0)


def attention_by_hand(p, x, segments):
    m = CFG.mla
    q = rms(x @ p["w_q_a"], p["q_norm"], m.latent_norm_eps)
    q = np.einsum("tr,rhk->thk", q, p["w_q_b"])
    both = x @ p["w_kv_a"]
    c = rms(both[:, : m.kv_lora_rank], p["kv_norm"], m.latent_norm_eps)
    shared = np.repeat(both[:, None, m.kv_lora_rank :], m.heads, axis=1)
    k = np.concatenate([np.einsum("tr,rhk->thk", c, p["w_k_b"]), shared], axis=-1)
    logits = np.einsum("thk,shk->hts", q, k) * m.query_dim**-0.5
    place = np.arange(len(x))
    seen = (segments[:, None] == segments) & (place[:, None] >= place)
    weights = np.exp(np.where(seen, logits, -np.inf))
    weights /= np.sum(weights, axis=-1, keepdims=True)
    o = np.einsum("hts,shv->thv", weights, np.einsum("tr,rhv->thv", c, p["w_v_b"]))
    o = o * sigmoid(np.einsum("td,dhv->thv", x, p["w_g"]))
    return np.einsum("thv,hvd->td", o, p["w_o"])


def experts_by_hand(p, x, bias, counted):
    scores = sigmoid(x @ p["w_router"])
    z = x @ p["w_latent_down"]
    u = np.zeros_like(z)
    for t in np.flatnonzero(counted):
        chosen = np.argsort(-(scores[t] + bias), kind="stable")[: CFG.moe.top_k]
        for e in chosen:
            hidden = situ(np.einsum("l,lgf->gf", z[t], p["experts"]["w_gate_up"][e]))
            out = hidden @ p["experts"]["w_down"][e]
            u[t] += scores[t, e] / np.sum(scores[t, chosen]) * out
    shared = situ(np.einsum("td,dgf->tgf", x, p["shared"]["w_gate_up"])) @ p["shared"]["w_down"]
    return rms(u, p["latent_norm"], CFG.moe.norm_eps) @ p["w_latent_up"] + shared


def loss_by_hand(variables, mixed, batch):
    """Σ -log p(token t+2 | t) in float64 from the backbone's mixture, one document after another.

    Also returns the number of predictions.
    """
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), variables)
    p = wide["params"]["mtp"]
    layer = jax.tree.map(lambda a: a[0], p["block"]["group_0"]["layer_0"])
    tokens, segments = batch["tokens"][0], batch["segment_ids"][0]
    eps, table = CFG.norm_eps, wide["params"]["embedding"]
    follows = np.append(segments[1:] == segments[:-1], False) & (segments > 0)
    e = np.where(follows[:, None], table[np.append(tokens[1:], 0)], 0.0)
    both = [rms(e, p["embed_norm"], eps), rms(mixed, p["hidden_norm"], eps)]
    x = np.concatenate(both, axis=-1) @ p["w_eh"]
    x = x + attention_by_hand(layer["mixer"], rms(x, layer["input_norm"], eps), segments)
    bias = wide["router"]["backbone"]["bias"][-1]
    x = x + experts_by_hand(layer["ffn"], rms(x, layer["post_norm"], eps), bias, follows)
    logits = rms(x, p["final_norm"], eps) @ wide["params"]["lm_head"]
    places = [t for t in range(T - 2) if follows[t] and follows[t + 1]]
    nll = [np.log(np.sum(np.exp(logits[t]))) - logits[t, tokens[t + 2]] for t in places]
    return np.sum(nll), len(nll)


def test_the_loss_equals_a_float64_computation_by_hand(run, variables, rng):
    batch = batch_of(*documents(rng, 6, 1, 2, 5))
    plain = jax.jit(lambda v, *ids: KimiK3(PLAIN).apply(v, *ids, mutable=["intermediates"]))
    out, sown = plain(without_layer(variables), batch["tokens"], batch["segment_ids"])
    mixed = np.asarray(sown["intermediates"]["output_mix"][0][0], np.float64)
    expected, count = loss_by_hand(variables, mixed, batch)
    (nll, sums), _ = run(batch)
    main = nll_sum(out.hidden, model.head_weight(variables["params"], PLAIN), batch)
    np.testing.assert_allclose(sums.nll, main, rtol=REORDERED)
    assert count == np.sum(two_ahead(batch)["weights"]) == 4 + 0 + 0 + 3
    np.testing.assert_allclose(nll, expected, rtol=HAND)
    # Tokens that have a next one in their document are routed and counted, no others.
    assert np.sum(sums.stats.load[-1]) == CFG.moe.top_k * (5 + 0 + 1 + 4)


def without_layer(variables):
    """The variables of `PLAIN` inside those of `CFG`."""
    params = {n: p for n, p in variables["params"].items() if n != "mtp"}
    bias = variables["router"]["backbone"]["bias"][:-1]
    return {"params": params, "router": {"backbone": {"bias": bias}}}


def test_packed_documents_have_the_summed_loss_and_gradient_of_separate_ones(run, rng):
    packed = documents(rng, 7, 3, 1, 5)
    (together, sums), grads = run(batch_of(*packed))
    nll, main, apart = 0.0, 0.0, jax.tree.map(np.zeros_like, grads)
    for ids in packed:
        (value, alone), grad = run(batch_of(ids))
        nll, main = nll + value, main + alone.nll
        apart = jax.tree.map(lambda a, g: a + np.asarray(g), apart, grad)
    np.testing.assert_allclose((together, sums.nll), (nll, main), rtol=REORDERED)
    assert largest_error(grads, apart) < GRADIENT


def test_a_documents_tokens_reach_no_other_documents_loss(run, rng):
    batch = batch_of(*documents(rng, 8, 8))
    batch["weights"][0, 8:] = 0.0
    (before, _), _ = run(batch)
    batch["tokens"][0, 8:] = (batch["tokens"][0, 8:] + 1) % CFG.vocab_size
    (after, _), grads = run(batch)
    assert before == after > 0
    only_second = np.setdiff1d(batch["tokens"][0, 8:], batch["tokens"][0, :8])
    assert len(only_second) and not np.any(grads["embedding"][only_second])


def test_targets_two_ahead_stay_in_the_document_and_keep_the_mask_of_the_main_loss(rng):
    first, second, cut = documents(rng, 5, 2, 11)
    batch = batch_of(first, second, cut, cut=True)
    batch["weights"][0, 2] = 0.0  # the fourth token is no target of the main loss
    ahead = two_ahead(batch)
    expected = np.zeros((1, T))
    expected[0, [0, 2]] = 1.0  # predict the third and the fifth token; the second document is short
    expected[0, 7:15] = 1.0  # the cut document's tenth token is known as a target
    np.testing.assert_array_equal(ahead["weights"], expected)
    np.testing.assert_array_equal(ahead["targets"][0, [0, 2]], first[[2, 4]])
    np.testing.assert_array_equal(ahead["targets"][0, 7:15], cut[2:10])
    stacked = two_ahead({n: np.stack([v, v]) for n, v in batch.items()})
    np.testing.assert_array_equal(stacked["weights"][1], expected)


def test_the_gradient_reaches_the_layer_the_backbone_and_both_ends_but_not_the_final_norm(run, rng):
    _, grads = run(batch_of(*documents(rng, 16)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Layer 0 reads a single source, whose weight is 1 whatever the query.
        idle = name == "final_norm" or name.startswith("backbone/block_0/group_0/layer_0/mixer_res")
        assert np.any(leaf) != idle, name
        assert np.all(np.isfinite(leaf)), name


@pytest.mark.slow
def test_without_the_layer_every_bit_is_as_before_and_with_it_the_main_loss_too(run, rng):
    key = jax.random.key(3)
    with_layer, plain = (jax.jit(lambda k, c=c: model.init(c, k))(key) for c in (CFG, PLAIN))
    assert with_layer["router"]["backbone"]["bias"].shape == (1, CFG.moe.experts)
    for a, b in zip(*map(jax.tree.leaves, (without_layer(with_layer), plain)), strict=True):
        np.testing.assert_array_equal(a, b)
    batch = batch_of(*documents(rng, 9, 6))

    @jax.jit
    def main(variables, batch):
        params, router = variables["params"], variables["router"]
        sums = forward_sums(CFG, params, router, batch, train=False)
        less = without_layer(variables)
        return sums, forward_sums(PLAIN, less["params"], less["router"], batch, train=True)

    evaluated, trained = main(with_layer, batch)
    assert evaluated.nll == trained.nll
    assert evaluated.mtp_nll is None and trained.mtp_nll is None


def test_rows_of_bias_and_largest_logits_belong_to_the_paths_that_depth_names():
    variables = model.abstract(MIXED)
    shapes = jax.eval_shape(
        lambda v: model.forward(MIXED, v, np.zeros((1, T), np.int32), train=True, max_logits=True),
        variables,
    )
    kinds = [kind for kind, _, _ in depth.parameter_paths(MIXED)]
    moe, mla = (sum(word in kind for kind in kinds) for word in ("moe", "mla"))
    assert shapes.stats.load.shape[0] == moe == 3
    assert variables["router"]["backbone"]["bias"].shape == (moe, MIXED.moe.experts)
    assert shapes.max_logits.shape == (mla, MIXED.mla.heads) == (2, 2)
    for kind, path, copy in depth.parameter_paths(MIXED):
        node = variables["params"]
        for name in path:
            node = node[name]
        assert ("w_kv_a" in node["mixer"], "w_router" in node["ffn"]) == (
            kind.mixer == "mla", kind.ffn == "moe",
        )  # fmt: skip
        assert copy < len(node["input_norm"])
    assert path[0] == "mtp"


@pytest.mark.slow
def test_a_step_weighs_the_second_loss_reports_both_and_balances_its_router(run, rng):
    tx = run_optimizer(OptimizerConfig(peak_lr=1e-3), 10)
    state = jax.jit(lambda: create_state(CFG, tx, 0))()
    pieces = [batch_of(*documents(rng, 9, 6)), batch_of(*documents(rng, 16))]
    whole = {n: np.concatenate([p[n] for p in pieces]) for n in pieces[0]}
    after, measured = jax.jit(train_step(CFG, tx, lambda _: 0.0))(state, pieces)

    def total(params):
        sums = forward_sums(CFG, params, state.router, whole, train=True)
        losses = sums.nll / total_weight(whole), sums.mtp_nll / total_weight(two_ahead(whole))
        return losses[0] + 0.3 * losses[1], losses

    (_, losses), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(state.params)
    np.testing.assert_allclose((measured.loss, measured.mtp_loss), losses, rtol=REORDERED)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(measured.grad_norm, norm, rtol=GRADIENT)
    assert measured.max_violation.shape == measured.dead_experts.shape == (1,)
    assert np.all(np.any(after.router["backbone"]["bias"], axis=-1))


def test_the_loss_with_the_layer_types_on_a_mesh_of_eight():
    mesh = make_mesh(MeshConfig(data=4, expert=2))
    with jax.set_mesh(mesh):
        variables, split = model.abstract(CFG), jax.sharding.NamedSharding(mesh, specs.TOKENS)
        types = {**dict.fromkeys(("tokens", "targets", "segment_ids"), "i4"), "weights": "f4"}
        batch = {n: jax.ShapeDtypeStruct((8, T), t, sharding=split) for n, t in types.items()}

        def ahead(params, router, batch):
            return forward_sums(CFG, params, router, batch, train=True).mtp_nll

        grads = jax.eval_shape(jax.grad(ahead), *variables.values(), batch)
    for a, b in zip(*map(jax.tree.leaves, (grads, variables["params"])), strict=True):
        assert (a.shape, a.sharding.spec) == (b.shape, b.sharding.spec)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mtp_layers": 2}, "mtp_layers=2: 0 or 1"),
        ({"mtp_loss_weight": 0.0}, "mtp_loss_weight=0.0"),
        ({"mtp_loss_weight": float("nan")}, "mtp_loss_weight=nan"),
    ],
)
def test_settings_of_the_layer_without_a_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MODEL, **changes)

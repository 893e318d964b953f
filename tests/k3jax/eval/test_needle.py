"""Needles stand where they should, and both judgements of an answer agree."""

import json

import numpy as np
import pytest
from small_runs import MODEL

from k3jax.eval import heat_map, needle
from k3jax.eval.haystack import BEGINNING, Case, RecallHaystack, TextHaystack
from k3jax.eval.needle import Cell, NeedleConfig
from k3jax.eval.score import Pair, compiled_scores, score
from k3jax.models.kimi_k3 import generate

DEPTHS = (0.0, 0.3, 1.0)


@pytest.fixture(scope="module")
def text(tokenizer, tmp_path_factory):
    file = tmp_path_factory.mktemp("hay") / "hay.txt"
    file.write_text("".join(f"line {number} of the hay\n" for number in range(300)))
    return TextHaystack(tokenizer, str(file))


@pytest.mark.parametrize("length", [60, 200, 1001])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_needle_in_text_is_whole_once_and_at_its_depth(tokenizer, text, length, depth):
    case = text.case(length, depth, np.random.default_rng(1))
    assert len(case.prompt) == length and case.prompt[0] == tokenizer.bos_id
    assert case.prompt.dtype == np.int32 and not np.any(case.prompt[1:] < 3)
    answer = tokenizer.decode(case.answer)
    question = tokenizer.decode(case.prompt).rpartition("\n")[2]
    assert question.startswith(BEGINNING.strip().partition("{")[0]) and answer.isdigit()
    sentence = tokenizer.encode_batch(["\n" + question, answer, ".\n"])
    asked, whole = sentence[0], np.concatenate(sentence)
    end = case.needle + len(whole)
    assert case.prompt[case.needle : end].tolist() == whole.tolist()
    assert case.prompt[-len(asked) :].tolist() == asked.tolist()
    filling = length - 1 - len(whole) - len(asked)
    assert case.needle == 1 + round(depth * filling)
    assert tokenizer.decode(case.prompt).count(answer) == 1


def test_a_needle_in_text_is_learnt_by_reading_it_and_not_from_the_tokens_split(tokenizer, text):
    # The answer's tokens in the needle are those asked for: joined text gives the same ids.
    case = text.case(100, 0.5, np.random.default_rng(2))
    joined = tokenizer.decode([*case.prompt, *case.answer]).rpartition("\n")[2]
    ids = [*case.prompt, *case.answer]
    assert ids[-len(tokenizer.encode(joined)) :] == tokenizer.encode(joined).tolist()


def test_a_prompt_follows_from_its_seed_alone(text):
    wanted = NeedleConfig((80, 60), (0.5,), trials=2)
    first = needle._case(text, wanted.seed, 80, 0.5, 1)
    assert first.prompt.tolist() == needle._case(text, 0, 80, 0.5, 1).prompt.tolist()
    for other in ((1, 80, 0.5, 1), (0, 80, 0.5, 0), (0, 80, 0.6, 1)):
        assert first.prompt.tolist() != needle._case(text, *other).prompt.tolist()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("length", [4, 10, 62])
def test_a_needle_of_ids_is_the_only_pair_of_its_key(length, depth):
    case = RecallHaystack(67, 4).case(length, depth, np.random.default_rng(3))
    assert len(case.prompt) == length and case.prompt[0] == 1
    pairs = case.prompt[1:-1].reshape(-1, 2)
    places = np.flatnonzero(pairs[:, 0] == case.prompt[-1])
    assert places.tolist() == [round(depth * (len(pairs) - 1))] and case.needle == 1 + 2 * places[0]
    assert pairs[places[0], 1] == case.answer[0]
    assert np.all((pairs[:, 0] >= 3) & (pairs[:, 0] < 35) & (pairs[:, 1] >= 35))
    # Every key keeps its value, and all four are there when there is room.
    assert len({tuple(pair) for pair in pairs.tolist()}) == min(4, len(pairs))
    assert len(set(pairs[:, 0].tolist())) == min(4, len(pairs))


def test_lengths_that_cannot_hold_the_question_are_refused(text):
    draw = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"needle_lengths=20: .* are \d+ tokens; give at least"):
        text.case(20, 0.5, draw)
    for length in (2, 9):
        with pytest.raises(ValueError, match=f"needle_lengths={length}: .* even"):
            RecallHaystack(67, 4).case(length, 0.5, draw)
    for keys in (1, 33):
        with pytest.raises(ValueError, match=rf"needle_keys={keys}: must lie in \[2, 32\]"):
            RecallHaystack(67, keys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "give one at least"),
        ({"depths": (0.5, 1.2)}, r"needle_depths=1\.2: a depth lies in \[0, 1\]"),
        ({"trials": 0}, "needle_trials=0"),
    ],
)
def test_a_table_without_a_meaning_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        NeedleConfig(**{"lengths": (64,), **changes})


class Repeats:
    """Cases whose answer is what the model says anyway, in every second trial."""

    def __init__(self, log_probabilities):
        self._of = log_probabilities
        self.made = []

    def case(self, length, depth, draw):
        prompt = draw.integers(3, 288, length).astype(np.int32)
        ids = prompt.tolist()
        for _ in range(2):
            ids.append(int(self._of(ids)[-1].argmax()))
        if len(self.made) % 2:
            ids[-1] = (ids[-1] + 1) % 288
        self.made.append(Case(prompt, np.array(ids[-2:], np.int32), 0))
        return self.made[-1]


def test_cached_generation_and_forced_scores_judge_alike(variables, log_probabilities):
    haystack = Repeats(log_probabilities)
    wanted = NeedleConfig((50, 60), (0.0, 1.0), trials=2)
    before = [f._cache_size() for f in (*generate._compiled(MODEL), compiled_scores(MODEL))]
    cells = needle.run(MODEL, variables, MODEL.vocab_size, needle.prepare(haystack, wanted), 2)
    after = [f._cache_size() for f in (*generate._compiled(MODEL), compiled_scores(MODEL))]
    # Two lengths of one bucket: one prefill, one decoding step, at most one scorer.
    assert max(np.subtract(after, before)) <= 1
    pairs = [Pair(case.prompt, case.answer) for case in haystack.made]
    scores = score(MODEL, variables, pairs, 2)
    assert [s.greedy for s in scores] == [True, False] * 4
    assert [cell[:3] for cell in cells] == [
        (length, depth, 0.5) for length in (50, 60) for depth in (0.0, 1.0)
    ]
    forced = np.reshape([s.log_probability for s in scores], (4, 2)).mean(axis=1)
    assert [cell.log_probability for cell in cells] == forced.tolist()


def test_the_table_and_the_picture_show_every_cell(tmp_path):
    cells = [Cell(n, d, n / 100, -float(n)) for n in (50, 100) for d in (0.0, 1.0)]
    lines = needle.format_table(cells, "accuracy", ".2f").splitlines()
    assert [line.split() for line in lines] == [
        ["length", "0", "1"], ["50", "0.50", "0.50"], ["100", "1.00", "1.00"],
    ]  # fmt: skip
    assert json.loads(json.dumps([cell._asdict() for cell in cells]))[3]["length"] == 100
    pytest.importorskip("matplotlib")
    assert heat_map.draw(cells, tmp_path / "needle.png")
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")

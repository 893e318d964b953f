"""lm-eval itself on local tasks: its numbers are those of the model's logits."""

import json

import numpy as np
import pytest
from small_runs import MODEL

from k3jax.eval import harness, suite
from k3jax.eval.suite import EvalConfig
from k3jax.eval.text_model import TextModel, read_generation

lm_eval = pytest.importorskip("lm_eval", reason="the [eval] extra is not installed")

CHOICES = """task: words
dataset_path: json
dataset_kwargs:
  data_files: {{test: words.jsonl}}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
metric_list:
  - metric: acc
"""
CONTINUE = """task: copies
dataset_path: json
dataset_kwargs:
  data_files: {{test: copies.jsonl}}
  cache_dir: {cache}
test_split: test
output_type: generate_until
doc_to_text: "{{{{start}}}}"
doc_to_target: "{{{{end}}}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""
WORDS = [
    {"start": "state decay", "choices": ["gate", "router expert"], "right": 0},
    {"start": "value query", "choices": ["layer", "block", "norm"], "right": 1},
    {"start": "token", "choices": ["head", "decay gate"], "right": 1},
]
STARTS = ["state decay", "value query layer"]


@pytest.fixture(scope="module")
def judge(variables, tokenizer):
    return TextModel(MODEL, variables, tokenizer, 64, batch_size=2)


@pytest.fixture
def write(tmp_path):
    """(name, YAML, rows of data) -> the task's file."""

    def written(name, form, rows):
        text = form.format(cache=tmp_path / "cache")
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        return tmp_path / f"{name}.yaml"

    return written


def test_a_multiple_choice_task_takes_the_choice_of_largest_log_likelihood(
    judge, tokenizer, write, log_probabilities
):
    right = 0
    for row in WORDS:
        sums = []
        for choice in row["choices"]:
            ids = [tokenizer.bos_id, *tokenizer.encode(f"{row['start']} {choice}").tolist()]
            start = len(tokenizer.encode(row["start"])) + 1
            table = log_probabilities(ids[:-1])[start - 1 :]
            sums.append(table[np.arange(len(ids) - start), ids[start:]].sum())
        right += int(np.argmax(sums)) == row["right"]
    assert 0 < right < 3  # a judge that is always right or wrong would show nothing
    results = harness.run(judge, harness.load_tasks([write("words", CHOICES, WORDS)]))
    assert results["words"]["acc"] == pytest.approx(right / 3)
    assert "words: acc" in harness.format_results(results)


def test_a_generation_task_compares_the_greedy_continuation(judge, write):
    wanted = read_generation({"until": ["\n\n"], "max_gen_toks": 8})
    made = judge.continue_texts([(start, wanted) for start in STARTS])
    rows = [{"start": STARTS[0], "end": made[0]}, {"start": STARTS[1], "end": made[1] + "?"}]
    results = harness.run(judge, harness.load_tasks([write("copies", CONTINUE, rows)]))
    assert results["copies"]["exact_match"] == 0.5


def test_a_task_of_one_question_is_written_as_plain_json(variables, tokenizer, write, tmp_path):
    # The standard error of one value is no number.
    wanted = EvalConfig(tasks=(str(write("words", CHOICES, WORDS[:1])),), batch_size=2)
    lines = []
    result = suite.run(MODEL, variables, tokenizer, wanted, tmp_path / "out", lines.append)
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert written["tasks"] == result["tasks"] and written["tasks"]["words"]["acc"] in (0, 1)
    assert any("words: acc " in line for line in lines)
    assert harness.format_results({"a": {"b": None}}) == "a: b not finite"


def test_pairs_are_encoded_as_lm_evals_own_template_does(judge, tokenizer):
    from lm_eval.api.model import TemplateLM

    class Template(TemplateLM):
        eot_token_id = tokenizer.eos_id
        _loglikelihood_tokens = loglikelihood_rolling = generate_until = None

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return [tokenizer.bos_id, *tokenizer.encode(string).tolist()]

    Template.__abstractmethods__ = frozenset()
    for pair in [("state", " decay"), ("state  ", "decay"), ("va", "lue x"), ("é\n", "🙂")]:
        assert tuple(judge.encode_pair(*pair)) == Template()._encode_pair(*pair)


def test_the_adapter_answers_all_three_sorts_of_requests(judge):
    from lm_eval.api.instance import Instance

    def requests(sort, *arguments):
        return [Instance(sort, {}, each, index) for index, each in enumerate(arguments)]

    model = harness.adapter(judge)
    pairs = [("state", " decay"), ("", "gate")]
    assert model.loglikelihood(requests("loglikelihood", *pairs)) == judge.log_likelihoods(pairs)
    rolling = requests("loglikelihood_rolling", ("gate decay",))
    assert model.loglikelihood_rolling(rolling) == judge.rolling(["gate decay"])
    options = {"until": ["\n\n"], "max_gen_toks": 8}
    made = model.generate_until(requests("generate_until", ("state", options)))
    assert made == judge.continue_texts([("state", read_generation(options))])


def test_a_task_that_is_none_is_refused_with_its_name(write, tmp_path):
    with pytest.raises(ValueError, match="hellaswag' is no YAML file; give a local"):
        harness.load_tasks(["hellaswag"])
    file = write("words", CHOICES, WORDS)
    (tmp_path / "words.jsonl").unlink()
    with pytest.raises(ValueError, match="words.yaml' cannot be loaded .*words.jsonl"):
        harness.load_tasks([file])

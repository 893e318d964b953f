"""Overrides, printing, comparison and recipes: every refusal names value, rule and way out."""

import dataclasses
import json
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax import config as config_lib
from k3jax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Kda:
    heads: int = 4
    head_dim: int = 32
    min_log_decay: float | None = -5.0

    def __post_init__(self):
        if self.heads * self.head_dim != 128:
            raise ValueError(f"heads {self.heads} x {self.head_dim} is not 128; change both")


@dataclasses.dataclass(frozen=True)
class Model:
    kda: Kda = Kda()
    moe: Kda | None = None
    layers: tuple[int, ...] = (3, 7, 8)
    names: tuple[str, ...] = ()
    activation: Literal["situ", "swiglu"] = "situ"
    tied: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    model: Model = Model()
    lr: float = 3e-4
    name: str = "tiny"
    corpus: str | None = None
    pair: tuple[int, float] = (1, 0.5)

    def __post_init__(self):
        if self.lr < 0:
            raise ValueError(f"lr={self.lr} is negative; use 3e-4")


@dataclasses.dataclass(frozen=True)
class Rule:
    balancing: Literal["sign", "none"] = "sign"
    block: int | Literal["full"] | None = 1


BASE = Run()


def test_a_choice_called_none_is_read_with_and_without_quotes():
    for text in ("none", '"none"'):
        assert config_lib.override(Rule(), [f"balancing={text}"]).balancing == "none"
    assert config_lib.override(Rule(), ["block=none"]).block is None
    assert config_lib.override(Rule(), ["block=full"]).block == "full"
    assert config_lib.override(Rule(), ["block=12"]).block == 12


def test_each_field_is_read_by_its_annotated_type():
    changed = config_lib.override(
        BASE,
        [
            "lr=1e-3",
            "name=a run=b",
            "corpus=src/**/*.py",
            "pair=2,0.25",
            "model.layers=1, 2",
            "model.names=(x,y)",
            "model.activation=swiglu",
            "model.tied=true",
            "model.kda.min_log_decay=none",
        ],
    )
    expected = Run(
        model=Model(Kda(min_log_decay=None), None, (1, 2), ("x", "y"), "swiglu", True),
        lr=1e-3,
        name="a run=b",
        corpus="src/**/*.py",
        pair=(2, 0.25),
    )
    assert changed == expected
    assert BASE == Run()


def test_fields_that_constrain_each_other_change_together_in_any_order():
    assignments = ["model.kda.heads=8", "model.kda.head_dim=16"]
    for order in (assignments, assignments[::-1]):
        assert config_lib.override(BASE, order).model.kda == Kda(8, 16)


def test_a_refusal_that_names_its_path_is_not_prefixed_again():
    with pytest.raises(ConfigError, match="^lr=-1.0 is negative; use 3e-4$"):
        config_lib.override(BASE, ["lr=-1"])


def test_the_later_of_two_assignments_to_one_field_counts():
    assert config_lib.override(BASE, ["name=a", "name=b"]).name == "b"


def test_validation_runs_again_and_its_refusal_names_the_path():
    with pytest.raises(ConfigError, match=r"model.kda: heads 3 x 32 is not 128; change both"):
        config_lib.override(BASE, ["model.kda.heads=3"])


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("model.kda.head=8", r"model.kda.head: no such field; did you mean 'heads'\? Kda has: "),
        ("modle.kda.heads=8", r"modle: no such field; did you mean 'model'\? Run has: model, lr"),
        ("zzz=8", r"zzz: no such field; Run has: model, lr, name"),
        ("name.x=8", r"name: it is tiny and has no field 'x'"),
        ("model.moe.heads=8", r"model.moe: it is none and has no field 'heads'"),
        ("model.kda=8", r"kda is a whole configuration; set model.kda.heads, .*or write a recipe"),
        ("model.moe=8", r"moe is a whole configuration; set one of its fields"),
        ("model.kda.heads=1.5", r"heads=1.5: expected an integer, for example model.kda.heads=4"),
        ("model.kda.heads=1e3", r"expected an integer"),
        ("lr=fast", r"lr=fast: expected a number, for example lr=0.0003"),
        ("lr=nan", r"lr=nan: expected a number"),
        ("model.tied=1", r"tied=1: expected true or false, for example model.tied=false"),
        ("model.activation=gelu", r"expected one of situ, swiglu, for example model.activation="),
        ("model.layers=1,x", r"expected a list of int with commas, for example .*=\(3,7,8\)"),
        ("model.layers=1,,2", r"expected a list of int"),
        ("pair=1,2,3", r"expected 2 values with commas"),
        ("model.kda.min_log_decay=no", r"expected a number or none, for example"),
        ("lr", r"'lr': expected path.to.field=value"),
        (".lr=1", r"expected path.to.field=value"),
    ],
)
def test_a_mistaken_assignment_is_refused_with_the_way_out(assignment, message):
    with pytest.raises(ConfigError, match=message) as error:
        config_lib.override(BASE, [assignment])
    assert "\n" not in str(error.value)


def test_setting_inside_a_part_that_an_earlier_assignment_removed_is_refused():
    with_moe = dataclasses.replace(BASE, model=Model(moe=Kda()))
    assert config_lib.override(with_moe, ["model.moe=none"]).model.moe is None
    with pytest.raises(ConfigError, match="an earlier assignment set moe to none"):
        config_lib.override(with_moe, ["model.moe=none", "model.moe.heads=8"])


text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
runs = st.builds(
    Run,
    model=st.builds(
        Model,
        moe=st.sampled_from([None, Kda()]),
        layers=st.lists(st.integers(-3, 99), max_size=4).map(tuple),
        names=st.lists(text | st.sampled_from(["none", "a,b", '"', "(", "1", ""])).map(tuple),
        activation=st.sampled_from(["situ", "swiglu"]),
        tied=st.booleans(),
    ),
    lr=st.floats(min_value=0),
    name=text,
    corpus=st.none() | text | st.just("none"),
    pair=st.tuples(st.integers(), st.floats(allow_nan=False)),
)


@settings(max_examples=100, deadline=None)
@given(runs)
def test_the_printed_text_and_the_stored_dict_read_back_to_the_same_configuration(run):
    base = dataclasses.replace(BASE, model=Model(moe=run.model.moe))
    assert config_lib.override(base, config_lib.to_text(run).splitlines()) == run
    assert config_lib.from_dict(Run, json.loads(json.dumps(config_lib.to_dict(run)))) == run


def test_the_text_is_complete_and_sorted():
    assert config_lib.to_text(BASE).splitlines() == [
        "corpus=none",
        "lr=0.0003",
        "model.activation=situ",
        "model.kda.head_dim=32",
        "model.kda.heads=4",
        "model.kda.min_log_decay=-5.0",
        "model.layers=(3,7,8)",
        "model.moe=none",
        "model.names=()",
        "model.tied=false",
        "name=tiny",
        "pair=(1,0.5)",
    ]


def test_a_stored_configuration_with_unknown_or_missing_keys_is_refused():
    stored = config_lib.to_dict(BASE)
    stored["model"]["kda"]["chunk"] = stored["model"]["kda"].pop("heads")
    with pytest.raises(ConfigError, match=r"^model.kda: unknown .*chunk.*missing .*heads"):
        config_lib.from_dict(Run, stored)


def test_a_stored_configuration_of_another_class_is_refused():
    with pytest.raises(ConfigError, match=r"Kda: unknown fields \['corpus', .*new run or convert"):
        config_lib.from_dict(Kda, config_lib.to_dict(BASE))


@pytest.mark.parametrize("value", [True, 1.0, "4", None, [4]])
def test_a_stored_value_of_another_type_is_refused(value):
    stored = config_lib.to_dict(BASE)
    stored["model"]["kda"]["heads"] = value
    with pytest.raises(ConfigError, match=r"^model.kda.heads: stored .*, expected an integer"):
        config_lib.from_dict(Run, stored)


def test_differences_names_each_changed_path_and_only_those():
    other = config_lib.override(BASE, ["model.kda.heads=8", "model.kda.head_dim=16", "lr=1"])
    expected = ["lr: 0.0003 != 1.0", "model.kda.head_dim: 32 != 16", "model.kda.heads: 4 != 8"]
    assert config_lib.differences(BASE, other) == expected
    stored = json.loads(json.dumps(config_lib.to_dict(other)))
    assert config_lib.differences(BASE, stored) == expected
    assert config_lib.differences(BASE, BASE) == []
    with_moe = dataclasses.replace(BASE, model=Model(moe=Kda()))
    assert "model.moe.heads: absent != 4" in config_lib.differences(BASE, with_moe)


def test_a_value_that_cannot_be_stored_is_refused():
    with pytest.raises(ConfigError, match="numbers, text, tuples and dataclasses"):
        config_lib.to_dict(dataclasses.replace(BASE, name=len))


RECIPE = """from __future__ import annotations
import dataclasses

@dataclasses.dataclass(frozen=True)
class Own:
    steps: int = 3

def config():
    return Own()
"""


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    files = {"mine": RECIPE, "empty": "x = 1\n", "odd": "def config():\n    return 3\n"}
    for name, source in files.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("name", ["mine", "mine.py", "configs/mine", "configs/mine.py"])
def test_a_recipe_is_found_by_name_and_by_path_and_can_be_overridden(recipes, name):
    config = config_lib.load_recipe(name)
    assert config_lib.override(config, ["steps=5"]).steps == 5


@pytest.mark.parametrize("name", ["configs/none_such.py", "none_such", ""])
def test_a_missing_recipe_is_refused_with_the_list_of_those_present(recipes, name):
    with pytest.raises(ConfigError, match="there is no file .*configs has empty, mine, odd"):
        config_lib.load_recipe(name)


def test_a_file_that_is_no_recipe_is_refused(recipes):
    with pytest.raises(ConfigError, match=r"empty.py: a recipe defines config\(\)"):
        config_lib.load_recipe("empty")
    with pytest.raises(ConfigError, match=r"config\(\) returned 3; return a configuration"):
        config_lib.load_recipe("odd")

"""Configurations from gin files: what is read, what is refused and with which words."""

import dataclasses
import math
import re
from typing import Any, Literal

import gin
import pytest

from jaxspec import gin_config
from jaxspec.gin_config import differences, load, operative_config, register, to_dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyRope:
    factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyDraft:
    passes: int
    tap_layers: tuple[int, ...] = (1, 2)
    rope: ToyRope | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyBlockDraft:
    block: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyOptimizer:
    learning_rate: float = 1e-3
    warmup: int = 0

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise ValueError(f"ToyOptimizer.learning_rate is {self.learning_rate}; above 0, please")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyExperiment:
    name: str = "toy"
    steps: int = 1
    loss_weight: float = 0.1
    shuffle: bool = True
    kind: Literal["grpo", "dapo"] = "grpo"
    cap: float | None = 2.0
    bounds: tuple[float, float] = (0.0, 1.0)
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    free: Any = None
    policy: ToyOptimizer = dataclasses.field(default_factory=ToyOptimizer)
    drafting: ToyOptimizer = ToyOptimizer(learning_rate=5e-2)
    draft: ToyDraft | ToyBlockDraft | None = None
    more: tuple[ToyOptimizer, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyNeed:
    inner: ToyDraft
    width: int


for toy in (ToyRope, ToyDraft, ToyBlockDraft, ToyOptimizer, ToyExperiment, ToyNeed):
    register(toy, module="toys")


@pytest.fixture(autouse=True)
def gin_stays_as_it_was():
    """Gin's own global state is the same after every call, failed ones too."""
    gin.bind_parameter("ToyRope.factor", 7.0)
    before = gin.config_str()
    yield
    assert gin.config_str() == before
    assert not gin.operative_config_str() and not gin.config_is_locked()
    gin.clear_config()


def toy(*bindings):
    return load(ToyExperiment, (), bindings)


def refusal(*bindings, cls=ToyExperiment):
    with pytest.raises(ValueError) as error:
        load(cls, (), bindings)
    return str(error.value)


def test_defaults_and_values():
    assert toy() == ToyExperiment()
    assert toy(
        "ToyExperiment.name = 'a' 'b'",
        "toys.ToyExperiment.steps = 1",
        "ToyExperiment.steps = -2",
        "ToyExperiment.loss_weight = 3",
        "ToyExperiment.cap = None",
        "ToyExperiment.bounds = [1, 2.5]",
        "ToyExperiment.table = {'x': 1}",
        "ToyExperiment.kind = 'dapo'",
    ) == ToyExperiment(
        name="ab",
        steps=-2,
        loss_weight=3.0,
        cap=None,
        bounds=(1.0, 2.5),
        table={"x": 1.0},
        kind="dapo",
    )
    assert type(toy("ToyExperiment.loss_weight = 3").loss_weight) is float


@pytest.mark.parametrize("value", [True, False])
def test_bools_can_be_switched_both_ways(value):
    config = toy(f"ToyExperiment.shuffle = {value}")
    assert config.shuffle is value
    assert f"ToyExperiment.shuffle = {value}\n" in operative_config(config)


def test_nested_settings_by_class_and_by_path():
    config = toy("ToyOptimizer.warmup = 10", "drafting/ToyOptimizer.learning_rate = 1e-4")
    assert config.policy == ToyOptimizer(warmup=10)
    assert config.drafting == ToyOptimizer(warmup=10, learning_rate=1e-4)
    kept = toy("ToyOptimizer.warmup = 10")
    assert kept.drafting == ToyOptimizer(warmup=10, learning_rate=5e-2)


def test_references_choose_among_classes():
    draft = toy("ToyExperiment.draft = @ToyDraft()", "ToyDraft.passes = 3").draft
    assert draft == ToyDraft(passes=3)
    assert toy("ToyExperiment.draft = @ToyBlockDraft()").draft == ToyBlockDraft()
    many = toy(
        "ToyExperiment.more = [@a/ToyOptimizer(), @b/ToyOptimizer()]",
        "a/ToyOptimizer.warmup = 1",
        "b/ToyOptimizer.warmup = 2",
    )
    assert [m.warmup for m in many.more] == [1, 2]


def test_a_later_none_switches_a_part_off():
    on = ("ToyExperiment.draft = @ToyDraft()", "ToyDraft.passes = 3")
    on += ("ToyDraft.rope = @ToyRope()", "ToyRope.factor = 2")
    assert toy(*on).draft.rope.factor == 2
    assert toy(*on, "ToyExperiment.draft = None").draft is None
    assert "no ToyDraft is built" in refusal("ToyExperiment.draft = None", on[1])


def test_macros():
    config = toy("rate = 0.5", "same = %rate", "ToyExperiment.bounds = (%same, %rate)")
    assert config.bounds == (0.5, 0.5)
    bindings = ("rate = 0.5", "ToyExperiment.cap = %rate", "ToyExperiment.cap = 3")
    assert toy(*bindings).cap == 3.0
    assert "no macro is named 'rat'; did you mean 'rate'?" in refusal(
        "rate = 1", "ToyExperiment.cap = %rat"
    )
    assert "is defined by itself" in refusal("a = %b", "b = %a")


def test_files_include_relative_to_themselves(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/leaf.gin").write_text("ToyExperiment.steps = 5\nToyExperiment.cap = 1\n")
    (tmp_path / "parts/middle.gin").write_text("include 'leaf.gin'\n")
    main = tmp_path / "main.gin"
    main.write_text("include 'parts/middle.gin'\n# text\nToyExperiment:\n  cap = 4\n  steps = 6\n")
    config = load(ToyExperiment, [str(main)], ["ToyExperiment.steps = 7"])
    assert (config.steps, config.cap) == (7, 4.0)


def test_errors_name_file_and_line(tmp_path):
    leaf = tmp_path / "leaf.gin"
    main = tmp_path / "main.gin"
    main.write_text("include 'leaf.gin'\n")

    def message(text):
        leaf.write_text(text)
        with pytest.raises(ValueError) as error:
            load(ToyExperiment, [main])
        return str(error.value)

    assert message("\nToyExperiment.steps = '3'\n") == (
        f"{leaf}:2: ToyExperiment.steps = '3' must be int"
    )
    assert message("ToyExperiment:\n  steps = 3\n  loss_wieght = 1\n") == (
        f"{leaf}:3: ToyExperiment has no setting 'loss_wieght'; did you mean 'loss_weight'?"
    )
    assert message("\n\nToyExperiment.draft = @ToyDraf()\n") == (
        f"{leaf}:3: no configurable is named 'ToyDraf'; did you mean 'ToyDraft'?"
    )
    assert message("ToyExperiment.shuffle = true\n").startswith(f"{leaf}:1: ")
    assert message("ToyExperiment.steps = (1,\n").startswith(f"{leaf}:")
    assert message("\nToyOptimizer.learning_rate = -1\n") == (
        "ToyExperiment.policy: ToyOptimizer.learning_rate is -1.0; above 0, please "
        f"(ToyOptimizer.learning_rate at {leaf}:2)"
    )
    assert message("include 'main.gin'") == f"{leaf}:1: {main} includes itself"
    assert message("include 'gone.gin'") == f"{leaf}:1: there is no gin file {tmp_path}/gone.gin"


@pytest.mark.parametrize(
    "binding, words",
    [
        ("ToyExperimnt.steps = 1", "no configurable is named 'ToyExperimnt'; did you mean 'ToyExp"),
        ("toy.ToyDraft.passes = 1", "named 'toy.ToyDraft'; did you mean 'toys.ToyDraft'?"),
        ("ToyOptimizer.lr = 1", "no setting 'lr'; known: learning_rate, warmup"),
        ("ToyOptimizer.warm_up = 1", "no setting 'warm_up'; did you mean 'warmup'?"),
        ("ToyExperiment.draft = @ToyDraft", "@ToyDraft must be written with ()"),
        ("ToyExperiment.steps = 1.0", "ToyExperiment.steps = 1.0 must be int"),
        ("ToyExperiment.steps = True", "ToyExperiment.steps = True must be int"),
        ("ToyExperiment.shuffle = 0", "ToyExperiment.shuffle = 0 must be bool"),
        ("ToyExperiment.shuffle = 'False'", "ToyExperiment.shuffle = 'False' must be bool"),
        ("ToyExperiment.shuffle = false", "values are Python literals such as 0.1, True"),
        ("ToyExperiment.loss_weight = '1'", "ToyExperiment.loss_weight = '1' must be float"),
        ("ToyExperiment.loss_weight = True", "ToyExperiment.loss_weight = True must be float"),
        ("ToyExperiment.loss_weight = None", "ToyExperiment.loss_weight = None must be float"),
        ("ToyExperiment.cap = 'x'", "ToyExperiment.cap = 'x' must be float or None"),
        ("ToyExperiment.name = 3", "ToyExperiment.name = 3 must be str"),
        ("ToyExperiment.kind = 'grop'", "must be 'grpo' or 'dapo'; did you mean 'grpo'?"),
        ("ToyExperiment.bounds = (1, 2, 3)", "must be tuple[float, float], and has 3 entries"),
        ("ToyExperiment.bounds = 1", "ToyExperiment.bounds = 1 must be tuple[float, float]"),
        ("ToyDraft.tap_layers = [1, '2']", "must be tuple[int, ...]"),
        ("ToyExperiment.table = {'x': 'y'}", "must be dict[str, float]"),
        ("ToyExperiment.policy = None", "ToyExperiment.policy = None must be ToyOptimizer"),
        (
            "ToyExperiment.draft = @s/ToyRope()",
            "ToyExperiment.draft = @s/ToyRope() must be ToyDraft or ToyBlockDraft or None",
        ),
        ("ToyExperiment.steps", "expected ':' or '='"),
    ],
)
def test_refused_bindings(binding, words):
    message = refusal(binding)
    assert words in message and message.startswith(f"binding {binding!r}: ")


@pytest.mark.parametrize(
    "bindings, words",
    [
        (
            ["ToyDraft.passes = 1"],
            "ToyDraft.passes has no effect; no ToyDraft is built: write ToyExperiment.draft = "
            "@ToyDraft()",
        ),
        (
            ["s/ToyBlockDraft.block = 1"],
            "no ToyBlockDraft is built in scope 's': write ToyExperiment.draft = @s/ToyBlockDraft",
        ),
        (["ToyNeed.width = 1"], "no ToyNeed is built: ToyExperiment holds none"),
        (["rate = 1"], "the macro 'rate' is never used; remove it"),
        (["steps = 1"], "the macro 'steps' is never used; a setting is written Name.steps"),
        (
            ["ToyExperiment.draft = @ToyDraft()"],
            "ToyExperiment.draft.passes has no value; bind ToyDraft.passes, which must be int",
        ),
    ],
)
def test_bindings_without_effect_and_values_left_out(bindings, words):
    assert words in refusal(*bindings)


def test_missing_and_recursive_values():
    assert "ToyNeed.inner.passes has no value" in refusal("ToyNeed.width = 1", cls=ToyNeed)
    built = load(ToyNeed, (), ["ToyNeed.width = 1", "ToyDraft.passes = 2"])
    assert built == ToyNeed(width=1, inner=ToyDraft(passes=2))
    message = refusal("ToyExperiment.free = @ToyExperiment()")
    assert "ToyExperiment refers to itself" in message


ROUND_TRIPS = [
    ToyExperiment(),
    ToyExperiment(
        name='it\'s "quoted"\nand % @',
        steps=-3,
        loss_weight=1e-7,
        shuffle=False,
        kind="dapo",
        cap=math.inf,
        bounds=(-math.inf, 0.1 + 0.2),
        table={"a b": 1e300},
        free=(1, (2.0, None, True)),
        policy=ToyOptimizer(warmup=3),
        draft=ToyDraft(passes=2, tap_layers=(), rope=ToyRope(factor=2.0)),
        more=(ToyOptimizer(), ToyOptimizer(warmup=1)),
    ),
]


@pytest.mark.parametrize("config", ROUND_TRIPS)
def test_operative_config_round_trip(config, tmp_path):
    path = tmp_path / "operative.gin"
    path.write_text(operative_config(config))
    assert load(ToyExperiment, [path]) == config


def test_operative_config_loads_with_gin_alone():
    config = dataclasses.replace(ROUND_TRIPS[1], free=None)
    gin.clear_config()
    gin.parse_config(operative_config(config))
    plain = gin.get_configurable(ToyExperiment)()
    gin.clear_config()
    gin.bind_parameter("ToyRope.factor", 7.0)
    assert type(plain) is ToyExperiment
    assert to_dict(plain) == to_dict(config)


def test_values_that_no_file_can_hold():
    with pytest.raises(ValueError, match=r"ToyExperiment.free = nan can't be written"):
        operative_config(ToyExperiment(free=math.nan))


def test_differences():
    a, b = (to_dict(config) for config in ROUND_TRIPS)
    assert differences(a, a) == {}
    found = differences(a, b)
    assert found["kind"] == ("grpo", "dapo") and found["policy.warmup"] == (0, 3)
    assert found["draft"][0] is None and found["draft"][1]["class"] == "ToyDraft"
    assert found["table.a b"] == ("(absent)", 1e300)
    assert "drafting.warmup" not in found
    drafts = ToyDraft(passes=8), ToyBlockDraft()
    swapped = differences(*(to_dict(ToyExperiment(draft=draft)) for draft in drafts))
    assert swapped["draft.class"] == ("ToyDraft", "ToyBlockDraft")


def test_only_frozen_keyword_dataclasses_are_registered():
    @dataclasses.dataclass
    class Loose:
        x: int = 0

    @dataclasses.dataclass(frozen=True)
    class Positional:
        x: int = 0

    with pytest.raises(ValueError, match="Loose must be a frozen dataclass"):
        register(Loose, module="toys")
    with pytest.raises(ValueError, match=re.escape("must be keyword-only; ['x'] are positional")):
        register(Positional, module="toys")
    with pytest.raises(ValueError, match="dict is not registered"):
        load(dict)
    assert register(ToyRope, module="toys") is ToyRope


def test_an_excuse_for_every_binding_is_seen(monkeypatch):
    """Planted fault: were every idle binding excused, the refusals above would not happen."""
    monkeypatch.setattr(gin_config._Builder, "_replaced_by_none", lambda self, binding: True)
    assert toy("ToyDraft.passes = 1") == ToyExperiment()

"""The choice of learners compares goodput with a cost, whose numbers are checked by hand."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.sim.goodput.methods import Row
from diloco_jax.sim.goodput.simulate import Options, run
from paper.choice import as_dict, choose, describe
from paper.choose import main
from paper.goodput import CHIPS, GOODPUT_1A
from paper.penalty import PENALTIES, cost_of, scaling_percent


def row(method: str, learners: int, chips: float, goodput: float) -> Row:
    return Row(method, learners, chips, goodput, 1.0, None, 10, 20, 30)


def paper(chips: float, *goodputs: float) -> list[Row]:
    """Return rows of elastic data parallel and of M = 2, 4, 8, 16, as in Table 1a."""
    names = ((1, "elastic"), (2, "decoupled"), (4, "decoupled"), (8, "decoupled"), (16, "decoupled"))
    return [row(method, many, chips, value) for (many, method), value in zip(names, goodputs, strict=True)]


AT_600K = paper(600e3, 0.69, 0.80, 0.89, 0.94, 0.96)
AT_2400K = paper(2.4e6, 0.40, 0.54, 0.73, 0.80, 0.86)


def test_scaling_laws_reproduce_the_published_losses() -> None:
    assert scaling_percent(8, 2.4e9) == pytest.approx(100 * (2.351 / 2.326 - 1))
    assert scaling_percent(4, 10e9) == pytest.approx(100 * (2.096 / 2.090 - 1))
    # The loss stays constant beyond the measured sizes.
    assert scaling_percent(8, 100e9) == scaling_percent(8, 2.4e9)
    between = math.sqrt(1.3e9 * 2.4e9)
    assert scaling_percent(2, between) == pytest.approx((scaling_percent(2, 1.3e9) + scaling_percent(2, 2.4e9)) / 2)
    assert scaling_percent(16, 35e6) == pytest.approx(2 * scaling_percent(8, 35e6) - scaling_percent(4, 35e6))


def test_a_loss_becomes_compute_by_the_scaling_law() -> None:
    cost = cost_of("scaling-laws", 8, parameters=2.4e9)
    assert cost.compute == pytest.approx((2.351 / 2.326) ** (2 / 0.0953))
    assert cost_of("scaling-laws", 8, parameters=2.4e9, slope=0.02).compute == pytest.approx((2.351 / 2.326) ** 50)


def test_scavenging_starts_at_four_learners_and_grows_with_doublings() -> None:
    costs = {learners: cost_of("scavenging", learners, parameters=5e9) for learners in (2, 4, 8, 16)}
    assert costs[2].compute == costs[4].compute == 1.0
    # By hand: differences 0.07, 0.03, 0.10, 0.16 %, doubled, at 0.322, 0.585, 1, 2 doublings
    assert costs[8].loss_percent == pytest.approx(0.169, abs=0.001)
    assert costs[16].loss_percent == pytest.approx(2 * (costs[8].loss_percent or 0))
    # Table 15a by hand: the loss falls by 0.0187 of itself for each e-fold of compute
    assert costs[16].compute == pytest.approx(1.0034 ** (1 / 0.0187), rel=0.01)


def test_scores_become_tokens() -> None:
    # M = 16: 1.17 points of 6.7 per decade (text), 3.87 of 9.6 (vision)
    cost = cost_of("scores", 16, parameters=5e9)
    assert math.log10(cost.compute) == pytest.approx((1.17 / 6.7 + 3.87 / 9.6) / 2, abs=1e-3)
    assert cost.loss_percent is None
    assert cost.noise > cost_of("scaling-laws", 16, parameters=5e9).noise


def test_our_measurement_is_reproduced() -> None:
    cost = cost_of("quickstart", 4, parameters=1e6)
    assert cost.loss_percent == pytest.approx(2.87)
    assert not cost.extrapolated
    assert cost_of("quickstart", 16, parameters=1e6).loss_percent == pytest.approx(2 * 2.87)


@given(st.sampled_from(sorted(PENALTIES)), st.integers(min_value=1, max_value=300), st.floats(1e5, 1e13))
def test_a_cost_is_never_a_gain(penalty: str, learners: int, parameters: float) -> None:
    cost = cost_of(penalty, learners, parameters=parameters)
    assert cost.compute >= 1.0
    assert cost.noise >= 0.0
    assert (cost == (0.0, 1.0, 0.0, False)) or learners > 1
    assert cost.extrapolated or learners <= 16


def test_a_measured_gain_is_not_counted() -> None:
    assert scaling_percent(2, 10e9) < 0
    assert cost_of("scaling-laws", 2, parameters=10e9)[:2] == (0.0, 1.0)


def test_extrapolated_costs_are_marked() -> None:
    assert cost_of("scaling-laws", 8, parameters=5e9).extrapolated
    assert not cost_of("scaling-laws", 4, parameters=5e9).extrapolated
    assert cost_of("scavenging", 2, parameters=5e9).extrapolated
    assert cost_of("quickstart", 2, parameters=5e9).extrapolated


@pytest.mark.parametrize(
    ("penalty", "learners", "parameters", "slope", "message"),
    [
        ("guess", 4, 5e9, None, "'guess' is unknown; choose from scavenging"),
        ("scores", 4, 5e9, 0.03, "leave one of the two out"),
        ("scavenging", 4, 0.0, None, "--parameters is 0.0; give a number above 0"),
        ("scavenging", 4, 5e9, -1.0, "--loss-slope is -1.0, but must be 0.001 to 10"),
        ("scavenging", 0, 5e9, None, "0 learners; use 1 or more"),
    ],
)
def test_bad_input_is_named(penalty: str, learners: int, parameters: float, slope: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost_of(penalty, learners, parameters=parameters, slope=slope)


def test_more_chips_want_more_learners() -> None:
    small, large = choose([*AT_600K, *AT_2400K], "scavenging", parameters=5e9)
    assert (small.chips, small.best.row.learners) == (600e3, 4)
    assert (large.chips, large.best.row.learners) == (2.4e6, 8)


@pytest.mark.parametrize(
    ("penalty", "best"),
    [("scavenging", (4, 4, 8)), ("scaling-laws", (4, 4, 4)), ("scores", (8, 8, 8)), ("quickstart", (2, 4, 4))],
)
def test_what_the_documentation_says_of_the_paper_s_goodput(penalty: str, best: tuple[int, ...]) -> None:
    rows = [
        row(method, learners, chips, percent / 100)
        for (method, learners), percents in GOODPUT_1A.items()
        for chips, percent in zip(CHIPS, percents, strict=True)
    ]
    choices = choose(rows, penalty, parameters=5e9)
    assert tuple(choice.best.row.learners for choice in choices[-3:]) == best


def test_progress_is_goodput_over_compute() -> None:
    (choice,) = choose(AT_2400K, "scaling-laws", parameters=2.4e9)
    option = choice.options[3]
    assert option.progress == pytest.approx(0.80 / (2.351 / 2.326) ** (2 / 0.0953))
    assert option.low < option.progress < option.high
    # Elastic data parallel has no cost.
    assert choice.options[0].progress == 0.40


def test_data_parallel_wins_where_nothing_fails() -> None:
    (choice,) = choose(paper(2400, 1.0, 1.0, 1.0, 1.0, 1.0), "quickstart", parameters=1e6)
    assert choice.best.row.method == "elastic"
    assert "it has no loss to compensate" in choice.why
    assert choice.why.endswith("No other option is within the noise.")


def test_the_reason_names_options_within_the_noise() -> None:
    (choice,) = choose(AT_2400K, "scavenging", parameters=5e9)
    assert choice.why.startswith("M = 8 makes the most progress, 73.1% of an ideal cluster's: 80.0%")
    assert "This penalty cannot separate it from M = 4, M = 16." in choice.why
    (choice,) = choose(AT_600K, "scaling-laws", parameters=5e9)
    assert "extrapolated" not in choice.why
    (choice,) = choose(AT_600K[3:], "scaling-laws", parameters=5e9)
    assert choice.why.endswith("The penalty of the best option is extrapolated.")


def test_the_table_and_the_object_say_the_same() -> None:
    (choice,) = choose(AT_600K, "scaling-laws", parameters=5e9)
    text, found = describe(choice), json.loads(json.dumps(as_dict(choice)))
    assert "2503.09799" in text
    assert "2503.09799" in found["source"]
    assert found["best"] == {"method": "decoupled", "learners": 4, "progress": choice.best.progress}
    assert [line.split()[1] for line in text.splitlines() if "<- best" in line] == ["4"]
    for option in found["rows"]:
        assert f"{option['goodput']:.1%}" in text
        assert f"{option['progress']:.1%}" in text
    assert choice.why in " ".join(text.split())


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="simulate at least one number of learners"):
        choose([], "scavenging", parameters=5e9)


@pytest.mark.extra("dev")
def test_the_output_of_a_simulation_is_chosen_from_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(fast=True, hours=0.5, workers=1, methods=("decoupled",), chips=("600k", "1.2m"))
    simulated, _ = run(options, lambda line: None)
    given, drawn = tmp_path / "goodput.json", tmp_path / "goodput.svg"
    given.write_text(json.dumps(simulated))
    words = ["--penalty", "scaling-laws", "--parameters", "2.4g", "--loss-slope", "0.1", "--plot", str(drawn)]
    assert main([str(given), *words, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choice"]
    assert [choice["chips"] for choice in choices] == [600e3, 1.2e6]
    costs = {row["learners"]: row["compute"] for row in choices[0]["rows"]}
    assert costs[8] == pytest.approx((2.351 / 2.326) ** 10)
    assert "decoupled M = 16" in drawn.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ('{"rows": [{}]}', [], "not an output of `diloco simulate --json`"),
        ('{"rows": []}', [], "the simulation has no rows"),
        (None, [], "No such file"),
        ('{"rows": []}', ["--parameters", "many"], "--parameters is 'many', but must be a number"),
    ],
)
def test_a_wrong_file_is_one_line(
    tmp_path: Path, text: str | None, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "goodput.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main([str(path), *words])
    assert message in capsys.readouterr().err

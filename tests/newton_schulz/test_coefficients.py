import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dmuon.newton_schulz.coefficients import REGISTRY, check_safe, resolve_coefficients
from dmuon.newton_schulz.polynomial import evaluate, largest_output
from tests.support.coefficients_table import PAGE, format_registry, output_range
from tests.support.polar_express import minimax_composition

# Printed in arXiv:2505.16932, v3.
POLAR_EXPRESS_RAW = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
# karpathy/nanochat and microsoft/dion.
POLAR_EXPRESS_NANOGPT = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# NVIDIA-NeMo/Emerging-Optimizers `aol`: published for AOL, unsafe after Frobenius normalisation.
FLIPS_SIGN = (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
)


def assert_close(found, expected, tolerance):
    for found_triple, expected_triple in zip(found, expected, strict=True):
        assert found_triple == pytest.approx(expected_triple, rel=tolerance)


def test_polar_express_lists_equal_the_published_and_the_generated_tables():
    # The paper's last digits come from a solve that had not fully settled.
    assert_close(minimax_composition(7), POLAR_EXPRESS_RAW, 1e-9)
    nanogpt = resolve_coefficients("polar_express_nanogpt")
    assert_close(nanogpt, POLAR_EXPRESS_NANOGPT, 1e-13)
    assert_close(nanogpt, minimax_composition(5, safety=0.02, cushion=0.02), 1e-13)
    for steps in (5, 6, 9, 12):
        *first, last = minimax_composition(steps)
        deflated = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in first]
        assert_close(resolve_coefficients("polar_express", steps), [*deflated, last], 1e-9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("original", (0.69891706, 0.71212008, 0.76543853, 0.69643641)),
        ("you", (1.01802522, 1.01904989, 0.98586935, 0.97834556)),
        ("polar_express_nanogpt", (1.02711018, 1.05916114, 0.91061088, 0.85912896)),
        ("polar_express_gram", (0.90602684, 0.87871542, 0.88492403, 1.01902788)),
        ("cans", (1.11316923, 0.91630878, 1.09641446, 1.00506942)),
        ("deepseek_v4", (1.00001916, 1.00006071, 1.00016323, 1.00001431)),
    ],
)
def test_scalar_maps_have_their_known_values(name, expected):
    coefficients = resolve_coefficients(name)
    values = [evaluate(sigma, coefficients) for sigma in (0.01, 0.1, 0.5, 1.0)]
    assert values == pytest.approx(expected, abs=2e-8)


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("steps", [None, 5, 6, 8, 10, 99])
def test_every_named_list_is_safe_and_has_the_steps_asked_for(name, steps):
    coefficients = resolve_coefficients(name, steps)
    assert len(coefficients) == (steps or REGISTRY[name].steps)
    check_safe(coefficients)


@pytest.mark.parametrize("name", ["polar_express", "polar_express_nanogpt", "cans"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_list_cut_before_it_has_come_near_to_one_is_refused(name, steps):
    # After four steps of Polar Express singular values reach 1.56, after one 1.99.
    with pytest.raises(ValueError, match="more steps"):
        resolve_coefficients(name, steps)


@settings(max_examples=100, deadline=None)
@given(
    triples=st.lists(
        st.tuples(st.floats(0.5, 5), st.floats(-8, 2), st.floats(-1, 4)), min_size=1, max_size=4
    )
)
def test_the_largest_output_is_that_of_a_fine_grid(triples):
    values = [[i / 600 for i in range(601)]]
    for triple in triples:
        values.append([evaluate(sigma, (triple,)) for sigma in values[-1]])
    found = largest_output(tuple(triples))
    lowest = min(value for step in values for value in step)
    assume(abs(lowest) > 1e-3 or lowest >= 0)
    if lowest < 0:
        assert found == math.inf
    elif math.isfinite(found):
        # A maximum between two points of the grid is steepened by every later step.
        assert max(values[-1]) <= found * (1 + 1e-12)
        assert found <= max(max(values[-1]) * 1.01, max(values[-1]) + 1e-3) or len(triples) > 2


def test_worst_errors_are_those_of_the_published_analysis():
    assert output_range("original", 1e-2) == pytest.approx((0.682, 1.134), abs=2e-3)
    assert output_range("you", 1e-3) == pytest.approx((0.475, 1.145), abs=2e-3)
    assert output_range("polar_express", 1e-3) == pytest.approx((0.852, 1.124), abs=2e-3)


def test_a_single_triple_is_repeated_and_a_list_is_cut_or_its_last_triple_repeated():
    one, two = (3.4445, -4.775, 2.0315), (1.5, -0.5, 0.0)
    assert resolve_coefficients(one, 3) == (one,) * 3
    assert resolve_coefficients(one) == (one,) * 5
    assert resolve_coefficients([one, two]) == (one, two)
    assert resolve_coefficients([one, two], 1) == (one,)
    assert resolve_coefficients([one, two], 4) == (one, two, two, two)


@pytest.mark.parametrize(
    ("spec", "steps", "message"),
    [
        ("jordan", 5, "known names"),
        ((1.5, -0.5), 5, "must be a name"),
        ([(1.5, -0.5)], 5, "must be a name"),
        ((), 5, "empty"),
        ((math.nan, 0.0, 0.0), 5, "finite"),
        ("original", 0, "between 1 and 99"),
        ("original", 100, "between 1 and 99"),
        (FLIPS_SIGN, None, "flips the sign"),
        ((8.0, 0.0, 0.0), 5, "diverges"),
    ],
)
def test_bad_lists_are_refused(spec, steps, message):
    with pytest.raises(ValueError, match=message):
        resolve_coefficients(spec, steps)


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("rounding", [2**-8, 2**-11, 2**-24])
def test_every_list_but_one_survives_rounding(name, rounding):
    coefficients = resolve_coefficients(name)
    if name == "cans" and rounding > 1e-6:
        with pytest.raises(ValueError, match="diverges"):
            check_safe(coefficients, rounding)
    else:
        check_safe(coefficients, rounding)


def test_the_table_in_the_docs_is_the_generated_one():
    assert format_registry() in PAGE.read_text()

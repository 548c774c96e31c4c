"""Tests Accordion with made-up telemetry."""

from policy_training import Training, report

from autopar.compression.policies import Accordion
from autopar.compression.policies.policy import Observation, Saving


def accordion(norms, **options):
    """The level of ``w`` after each window of one observation."""
    policy = Accordion(low="int8", high="sign", every=10, window=1, **options)
    training = Training(policy, {"w": "int8"})
    levels = []
    training.observe({"w": norms[0]})  # Gives the first residual.
    for norm in norms:
        before = training.codecs["w"]
        training.observe({"w": norm})
        levels.append(training.codecs["w"])
        if training.codecs["w"] != before:
            training.observe({"w": norm})
    return levels


def test_accordion_compresses_more_where_norms_change_less_than_eta():
    #        first, steady, fell by 0.51, by 0.49, rose by 0.5
    norms = [1.0, 1.1, 1.1 * 0.49, 1.1 * 0.49 * 0.51, 1.1 * 0.49 * 0.51 * 1.51]
    assert accordion(norms) == ["int8", "sign", "int8", "sign", "int8"]


def test_accordion_decides_for_each_gradient():
    policy = Accordion(low="int8", high="sign", every=1, window=2)
    training = Training(policy, {"a": "int8", "b": "int8", "bias": "dense"})
    for step in range(5):
        training.observe({"a": 1.0, "b": 1.0 if step < 3 else 2.0})
    assert training.codecs == {"a": "sign", "b": "int8", "bias": "dense"}
    assert policy.critical() == ("b",)


def test_accordion_together_looks_at_the_norm_of_all():
    """One gradient's jump is much of its own norm, and little of the norm of all."""
    norms = {"large": 10.0, "little": 1.0}
    for jump, critical in ((4.0, ()), (30.0, ("large", "little"))):
        policy = Accordion(low="int8", high="sign", every=1, window=1, together=True)
        training = Training(policy, dict.fromkeys(norms, "int8"))
        for _ in range(5):
            training.observe(norms)
        training.observe({**norms, "little": jump})
        assert policy.critical() == critical
        assert len(set(training.codecs.values())) == 1


def test_accordion_compares_gradients_not_residuals():
    """With a residual that grows to ten times the gradient, nothing is critical."""
    policy = Accordion(low="int8", high="sign", every=1, window=5)
    training = Training(policy, {"w": "int8"})
    squared = 0.0  # Of the residual; orthogonal to each new gradient of norm 1.
    changes = 0
    for _ in range(80):
        wanted = 1.0 + squared
        squared = 0.0 if training.codecs["w"] == "int8" else 0.99 * wanted
        wish = training.observe({"w": wanted**0.5}, {"w": squared**0.5})
        changes += wish is not None
    assert squared > 30
    assert changes == 1
    assert training.codecs["w"] == "sign"


def test_accordion_is_critical_after_a_drop_of_the_learning_rate():
    policy = Accordion(low="int8", high="sign", every=10, window=1, drops=(55,))
    training = Training(policy, {"w": "int8"})
    for _ in range(8):
        training.observe()
    levels = [step["w"] for step in training.history]
    # Steps 10 to 80: the drop is seen at 60; 70 gives the residual, 80 decides.
    assert levels == [*["int8"] * 2, *["sign"] * 3, *["int8"] * 2, "sign"]


def test_accordion_may_be_put_off_where_it_compresses_more():
    """Not where it compresses less; norms are followed meanwhile."""
    policy = Accordion(low="int8", high="sign", every=10, window=1)

    def asked(codec, norm, step):
        seen = {"w": report(codec, norm=norm)}
        return policy.observe(Observation(step, 1.0, seen, True))

    assert asked("int8", 1.0, 10) is asked("int8", 1.0, 20) is None
    wish = asked("int8", 1.0, 30)
    assert wish == {"w": "sign"}
    assert isinstance(wish, Saving)
    # Put off. A jump makes the regime critical again: what is in use is right.
    assert asked("int8", 1.0, 40) == {"w": "sign"}
    assert asked("int8", 9.0, 50) is None
    assert policy.critical() == ("w",)
    asked("int8", 9.0, 60)
    assert asked("int8", 9.0, 70) == {"w": "sign"}
    assert asked("sign", 9.0, 80) is asked("sign", 9.0, 90) is None
    wish = asked("sign", 90.0, 100)
    assert wish == {"w": "int8"}
    assert not isinstance(wish, Saving)


def test_accordion_starts_a_window_when_other_codecs_come_into_use_late():
    """The residual that `sign` builds up then is not taken for a change of norm."""
    policy = Accordion(low="int8", high="sign", every=1, window=3)
    wishes = []
    for step in range(40):
        late = step >= 9
        residual = 30.0**0.5 if late else 0.0
        norm = (1.0 + residual**2) ** 0.5
        seen = {"w": report("sign" if late else "int8", norm, residual=residual)}
        wishes.append(policy.observe(Observation(step, 1.0, seen, True)))
    assert wishes[8] == {"w": "sign"}
    assert wishes[9:] == [None] * 31

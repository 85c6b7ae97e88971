"""The config and the container of torchtitan, without ranks."""

import pytest

from examples.trainers import tiny
from tests.support.launch import needs

pytestmark = [needs("torchtitan"), pytest.mark.filterwarnings("ignore")]


def test_options_and_rules_reach_the_optimizer():
    # --8<-- [start:options]
    from dmuon.integrations.torchtitan import default_muon

    optimizer = default_muon(lr=8e-4, routing={"adamw": ["down"]}, momentum=0.9)
    # --8<-- [end:options]
    (muon,) = optimizer.build(model_parts=[tiny.make_model()])
    by_algorithm = {True: [], False: []}
    for group in muon.param_groups:
        assert (group["lr"], group["momentum"]) == (8e-4, 0.9)
        by_algorithm[group["use_muon"]] += group["param_names"]
    assert by_algorithm[True] == ["blocks.0.up.weight", "blocks.1.up.weight"]
    assert "blocks.0.down.weight" in by_algorithm[False]


def test_there_is_one_optimizer_per_pipeline_part():
    from dmuon.integrations.torchtitan import default_muon

    blocks = tiny.make_model().blocks
    container = default_muon().build(model_parts=list(blocks))
    assert len(container) == 2
    assert [o.param_groups[0]["param_names"] for o in container] == [
        ["up.weight", "down.weight"]
    ] * 2


def test_groups_of_the_base_config_are_refused():
    from torchtitan.components.optimizer import default_adamw

    from dmuon.integrations.torchtitan import MuonContainer

    config = MuonContainer.Config(param_groups=default_adamw().param_groups)
    with pytest.raises(ValueError, match="replace param_groups"):
        config.build(model_parts=[tiny.make_model()])

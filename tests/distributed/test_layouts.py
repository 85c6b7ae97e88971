from torch.distributed.tensor import Replicate, Shard
import torch
import pytest
from tests.distributed.parity import Spec, check, run_parity

S, R = Shard, Replicate()
LAYOUTS = {
 "fsdp2": (2, [Spec((16,16),(2,),(S(0),)), Spec((8,16),(2,),(S(0),)), Spec((16,8),(2,),(S(0),))]),
 "fsdp4-uneven": (4, [Spec((18,32),(4,),(S(0),)), Spec((9,8),(4,),(S(0),)), Spec((5,7),(4,),(S(0),)), Spec((3,9),(4,),(S(0),)), Spec((1,8),(4,),(S(0),))]),
 "hsdp": (4, [Spec((6,4),(2,2),(R,S(0))), Spec((7,5),(2,2),(R,S(0))), Spec((1,5),(2,2),(R,S(0)))]),
 "ddp": (2, [Spec((6,4)), Spec((4,9)), Spec((8,8))], dict(process_group="world")),
 "ddp-shard": (4, [Spec((6,4)), Spec((4,9)), Spec((8,8)), Spec((5,8))], dict(process_group="world", shard_state=True)),
 "tp": (4, [Spec((8,8),(2,2),(S(0),S(1))), Spec((10,6),(2,2),(S(1),S(0))), Spec((10,6),(2,2),(S(0),S(0))), Spec((10,6),(2,2),(R,R))]),
 "shard1": (4, [Spec((8,9),(4,),(S(1),)), Spec((4,6,8),(4,),(S(2),)), Spec((2,3,4,5),(2,2),(S(1),S(3))), Spec((4,6,8),(2,2),(S(0),S(1)))]),
 "conv": (4, [Spec((8,3,3,3),(4,),(S(0),),options=dict(flatten=True)), Spec((8,6,3),(4,),(S(1),),options=dict(flatten=True)), Spec((8,3,5,2),(2,2),(S(0),S(2)),options=dict(flatten=True))]),
 "split": (4, [Spec((12,16),(4,),(S(0),),options=dict(split=(8,2,2))), Spec((10,6),(4,),(S(0),),options=dict(split=(6,2,2))), Spec((8,8),(4,),(S(0),),options=dict(split=((2,2,2,2),1)))]),
 "bf16": (2, [Spec((8,8),(2,),(S(0),),dtype=torch.bfloat16)]*3+[Spec((6,6),(2,),(S(0),))]*2),
}

@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("cap", [64, 1e-4])
def test_update_is_the_same_on_every_layout(run_ranks, name, cap):
    world, specs, *muon = LAYOUTS[name]
    check(run_ranks(world, body, specs, dict(bucket_cap_mb=cap, **(muon[0] if muon else {}))))

def body(specs, muon):
    return run_parity(specs, muon=muon)

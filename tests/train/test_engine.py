import psutil
import pytest


@pytest.mark.parametrize("zero", [["zero=1"], ["zero=2"], ["zero=3"], ["zero=3", "zero.offload=true"]])
def test_an_engine_reserves_no_more_than_a_small_head_needs(small, tmp_path, zero):
    small(tmp_path / "first", *zero)._one_step()  # what DeepSpeed loads once
    before = psutil.Process().memory_info().vms
    trainer = small(tmp_path / "again", *zero)
    trainer._one_step()
    assert psutil.Process().memory_info().vms - before < 200e6  # DeepSpeed's own bucket is 2 GB

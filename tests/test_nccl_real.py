"""The real CuPy and NCCL wheels, as far as they go without a GPU: what we call is there, and does what we think."""

from __future__ import annotations

import inspect

import pytest
import torch

from zeropp_ray.comm.base import Waits
from zeropp_ray.comm.nccl import Communicators, _failure, check_version, load

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def nccl():
    pytest.importorskip("cupy", reason="needs the extra cuda, which make test-all installs")
    return load()


def test_both_wheels_load_and_the_version_will_do(nccl):
    assert nccl.available
    assert nccl.get_version() >= 22809
    check_version(nccl.get_version(), shared=nccl.get_version() >= 23200)


def test_a_driver_without_a_gpu_makes_unique_ids(nccl):
    first, second = nccl.get_unique_id(), nccl.get_unique_id()
    assert first != second
    assert bytes.fromhex(first.hex()) == first
    assert len(first) == 128


def test_all_that_is_called_is_there(nccl):
    communicator = nccl.NcclCommunicator
    for name in ("allGather", "allReduce", "reduceScatter", "send", "recv", "abort", "check_async_error"):
        assert callable(getattr(communicator, name))
    for name, arguments in {
        "allGather": "sendbuf, intptr_t recvbuf, size_t count, int datatype, intptr_t stream",
        "allReduce": "sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, intptr_t stream",
        "reduceScatter": "sendbuf, intptr_t recvbuf, size_t recvcount, int datatype, int op, intptr_t stream",
        "send": "sendbuf, size_t count, int datatype, int peer, intptr_t stream",
        "recv": "recvbuf, size_t count, int datatype, int peer, intptr_t stream",
    }.items():
        assert arguments in getattr(communicator, name).__doc__
    nccl.groupStart()
    nccl.groupEnd()


def test_each_dtype_has_a_number_of_its_own(nccl):
    dtypes = Communicators(nccl, Waits(), 1.0).dtypes
    assert {torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8} <= dtypes.keys()
    assert len({*dtypes.values()}) == len(dtypes)


def test_a_communicator_that_is_none_can_be_aborted_and_says_that_it_fails(nccl):
    nothing = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
    nccl.groupStart()
    nothing.abort()
    nccl.groupEnd()
    assert "INVALID_ARGUMENT" in _failure(nothing)


def test_errors_have_the_numbers_that_we_tell_them_apart_by(nccl):
    assert issubclass(nccl.NcclError, RuntimeError)
    assert {status: nccl.NcclError(status).status for status in (1, 2, 3, 4, 5, 6)} == {n: n for n in range(1, 7)}
    assert "REMOTE_ERROR" in str(nccl.NcclError(6))
    with pytest.raises(KeyError) as error:  # the name of "in progress", which cupy does not know
        nccl.NcclError(7)
    assert error.value.args == (7,)


def test_communicators_cannot_be_made_without_blocking(nccl):
    """Or forming them would need no thread."""
    assert nccl.NcclConfig.__doc__.startswith("NcclConfig(split_share=0)")
    assert not [name for name in dir(nccl.NcclConfig) if "block" in name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_an_error_and_no_crash(nccl):
    with pytest.raises(nccl.NcclError, match="CUDA"):
        nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)


def test_the_arguments_of_torch_that_are_used():
    assert "priority" in inspect.signature(torch.cuda.Stream.__new__).parameters
    assert "non_blocking" in torch.Tensor.copy_.__doc__

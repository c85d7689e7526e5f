"""Ranks as real processes over gloo agree with their simulation, and end together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import distributed_ranks as program
import pytest
import torch
import torch.distributed as dist
from patience import HANG
from safetensors.torch import load_file, save_file

from mone_ref import loading
from mone_ref.errors import show
from mone_ref.parallel import __main__ as command
from mone_ref.parallel import model
from mone_ref.parallel.plan import Plan

LOOPBACK = socket.if_indextoname(1)
"""All ranks are here: no name of this machine is looked up, and no other interface is needed."""
DTYPES = (torch.float32, torch.bfloat16)
OLMOE = program.checkpoint("olmoe-ranks")


@contextmanager
def meeting_point(ranks: int) -> Iterator[dict[str, str]]:
    """Where ranks find each other, as their environment.

    The store is held here, as torchrun holds it: a port that was only looked for could be
    somebody else's by the time rank 0 comes to it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield os.environ | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
    }


def ended(
    commands: Sequence[Sequence[str]], shared: Mapping[str, str]
) -> tuple[list[subprocess.Popen[str]], list[tuple[str, str]]]:
    """One process a rank, all of which have ended, and what they printed."""
    started = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        return started, [process.communicate(timeout=HANG) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    """What each of four processes saw and printed; all of them have ended."""
    out = tmp_path_factory.mktemp("ranks")
    with meeting_point(4) as shared:
        started, printed = ended([[sys.executable, program.__file__, str(out)]] * 4, shared)
    for process, (_, errors) in zip(started, printed, strict=True):
        assert process.returncode == 0, errors
    return [load_file(out / f"{rank}.safetensors") for rank in range(4)], [o for o, _ in printed]


def test_every_rank_ends_with_the_same_bits(ranks):
    seen, _ = ranks
    same = [key for key in seen[0] if key != "adds"]
    for other in seen[1:]:
        assert all(torch.equal(seen[0][key], other[key]) for key in same)


@pytest.mark.parametrize("plan_name", ["tp2pp2", "pp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_up_to_two_ranks_a_stage_agree_with_the_simulation_bit_for_bit(ranks, plan_name, dtype):
    # One sum of two rounded numbers has one rounding, whoever forms it.
    name, plan = program.PLANS[plan_name]
    simulated = model.load(program.checkpoint(name), dtype, plan).score([program.PROMPT])[0]
    assert torch.equal(ranks[0][0][f"{plan_name}.{dtype}"], simulated)


def test_the_sum_of_four_ranks_is_within_its_rounding(ranks):
    # n rounded partials added in any order: |error| <= (n - 1) u sum |partial| to first order;
    # u = 2^-8 of bfloat16, and n u / (1 - n u) bounds all orders (Higham, gamma).
    exact, u = program.TERMS.double().sum(), 2.0**-8
    bound = 3 * u / (1 - 3 * u) * program.TERMS.abs().double().sum()
    found = ranks[0][0]["sum"].double()
    assert abs(found - exact) <= bound
    assert found != exact  # the bound is not idle


@pytest.mark.parametrize("dtype", DTYPES)
def test_four_ranks_are_as_near_to_the_truth_as_their_simulation(ranks, dtype):
    # Each of the reductions of a forward pass (embedding, then two a layer) may round by gamma
    # where the simulation rounds once. To first order a difference of that size moves answers
    # as the simulation's own rounding does, which is what its distance to float64 shows.
    parameters = loading.load(OLMOE, dtype)
    truth = loading.load(OLMOE, torch.float64).score([program.PROMPT])[0]
    simulated = model.load(OLMOE, dtype, Plan(4)).score([program.PROMPT])[0].double()
    real = ranks[0][0][f"tp4.{dtype}"].double()
    assert parameters.precision.params is dtype
    gamma_over_u = 3
    assert (real - simulated).abs().max() <= gamma_over_u * (simulated - truth).abs().max()


def test_collectives_keep_the_order_of_ranks_and_one_rank_adds(ranks):
    seen, _ = ranks
    assert seen[0]["gathered"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert [float(one["adds"]) for one in seen] == [1, 0, 0, 0]


def test_what_one_rank_refuses_all_refuse(ranks):
    _, printed = ranks
    for one in printed:
        assert one.splitlines() == [
            "every rank: CONSTANT_SHAPE/shape",
            "one rank: NON_FINITE_CONSTANT/stored",
            "reload: UNSUPPORTED/layerwise-reload",
            "sizes: UNSUPPORTED/ranks",
            "one load: CHECKPOINT/not-a-directory",
        ]


def test_refused_changes_change_nothing_and_updates_reach_every_rank(ranks):
    seen = ranks[0][0]
    assert torch.equal(seen["refused"], seen["tp2pp2.torch.float32"])
    updated = program.checkpoint("qwen3-explicit-updated")
    fresh = model.load(updated, torch.float32, Plan(2, 2)).score([program.PROMPT])[0]
    assert torch.equal(seen["updated"], fresh)
    assert not torch.equal(seen["updated"], seen["refused"])


# -- the command


def run(arguments: list[str], processes: int) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    torchrun += ["--local-addr=127.0.0.1"]
    return subprocess.run(
        [sys.executable, *torchrun, "-m", "mone_ref.parallel", *arguments],
        env=os.environ | {"GLOO_SOCKET_IFNAME": LOOPBACK},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


def test_the_command_answers_alike_simulated_and_under_torchrun(tmp_path: Path, capsys):
    real, simulated = tmp_path / "real.safetensors", tmp_path / "simulated.safetensors"
    asked = [str(OLMOE), "--tokens", "1,5,9", "--tp", "2"]
    done = run([*asked, "--out", str(real)], 2)
    assert done.returncode == 0, done.stderr
    assert command.main([*asked, "--out", str(simulated)]) == 0
    assert capsys.readouterr().out == done.stdout
    assert torch.equal(load_file(real)["logprobs"], load_file(simulated)["logprobs"])


def test_the_command_refuses_with_one_message(capsys):
    asked = [str(program.checkpoint("olmoe-approx")), "--tokens", "1", "--tp", "2"]
    assert command.main(asked) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "num_heads: found 3 among 2 ranks, expected 1, 3 ranks" in told.err


def test_wrong_usage_is_told_without_a_traceback(tmp_path: Path, capsys):
    asked = [str(OLMOE), "--tokens", "1"]
    none, garbage = tmp_path / "none", tmp_path / "garbage"
    garbage.write_bytes(b"no safetensors file")
    for words, told in (
        ([str(OLMOE), "--tokens", "900"], "PROMPT/vocabulary --tokens[0]: found 900, expected"),
        ([str(OLMOE), "--tokens", "1,one"], "PROMPT/not-an-id --tokens[1]: found 'one', expected"),
        ([*asked, "--update", str(none)], f"--update {show(str(none))}: found No such file"),
        ([*asked, "--update", str(garbage)], f"--update {show(str(garbage))}: found Error while"),
        ([*asked, "--out", str(tmp_path)], f"--out {show(str(tmp_path))}: found Error while"),
    ):
        assert command.main(words) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert told in printed.err
        assert len(printed.err.splitlines()) == 1


def test_a_rank_that_goes_ends_the_others_with_one_line(tmp_path: Path):
    """Rank 1 alone is given an update that is no file, and ends before the ranks compare."""
    constants = tmp_path / "constants.safetensors"
    save_file(program.constants_of("olmoe-ranks"), constants)
    words = [str(OLMOE), "--tokens", "1,5,9", "--tp", "2", "--update"]
    commands = [
        [sys.executable, "-m", "mone_ref.parallel", *words, str(update)]
        for update in (constants, tmp_path / "none")
    ]
    with meeting_point(2) as shared:
        started, printed = ended(commands, shared | {"TORCHELASTIC_RUN_ID": "test"})
    assert [process.returncode for process in started] == [3, 2]
    assert [out for out, _ in printed] == ["", ""]
    (told,) = [line for line in printed[0][1].splitlines() if line.startswith("error")]
    assert told.startswith("error: another rank is gone, or never came: ")
    assert "Traceback" not in printed[0][1]

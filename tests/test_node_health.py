"""What a node looks at before it takes a seat: each check on made-up machines, good and bad ones."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ft_wrapper import check, run
from ft_wrapper.check import node
from ft_wrapper.check.findings import Finding
from ft_wrapper.run import main

GIB = 1 << 30
MIB = 1 << 20


def lines(found: Iterable[Finding]) -> list[str]:
    """What was found, which is a line each."""
    said = [str(finding) for finding in found]
    assert all("\n" not in line and line.count("; ") >= 1 for line in said)
    return said


# GPUs ------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Gpu:
    """A GPU, as the driver sees it: a good one."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.action: int | None = 0
        self.rows: tuple[int, int, int, int] | NvmlError = (3, 2, 0, 0)
        self.uncorrected: int | NvmlError = 0


class Nvml(types.ModuleType):
    """What nvidia-ml-py would answer; names and shapes as in version 13."""

    def __init__(self, count: int = 4) -> None:
        super().__init__("pynvml")
        self.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
        self.NVML_SUCCESS = 0
        self.NVML_ERROR_NOT_SUPPORTED = 3
        self.NVML_ERROR_NO_PERMISSION = 4
        self.NVML_ERROR_NOT_FOUND = 6
        self.NVML_ERROR_DRIVER_NOT_LOADED = 9
        self.NVML_ERROR_GPU_IS_LOST = 15
        self.NVML_ERROR_RESET_REQUIRED = 16
        self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
        self.NVML_VOLATILE_ECC = 0
        self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
        self.NVML_GPU_RECOVERY_ACTION_NONE = 0
        self.NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1
        self.NVMLError = NvmlError
        self.gpus: list[Gpu | NvmlError] = [Gpu(f"GPU-{index}-uuid") for index in range(count)]
        self.open = 0
        self.has_driver = True

    def __getitem__(self, index: int) -> Gpu:
        gpu = self.gpus[index]
        assert isinstance(gpu, Gpu)
        return gpu

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NvmlError(self.NVML_ERROR_DRIVER_NOT_LOADED)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if index >= len(self.gpus):
            raise NvmlError(self.NVML_ERROR_NOT_FOUND)
        return self._usable(self.gpus[index])

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, fields: list[int]) -> list[Any]:
        assert fields == [self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        code = self.NVML_SUCCESS if gpu.action is not None else self.NVML_ERROR_NOT_SUPPORTED
        return [types.SimpleNamespace(nvmlReturn=code, value=types.SimpleNamespace(uiVal=gpu.action))]

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, int, int, int]:
        return self._usable(gpu.rows)

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, since: int) -> int:
        assert (kind, since) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return self._usable(gpu.uncorrected)

    def _usable(self, answer: Any) -> Any:
        assert self.open == 1
        if isinstance(answer, NvmlError):
            raise answer
        return answer


@pytest.fixture
def nvml() -> Nvml:
    return Nvml()


def of_gpus(nvml: Nvml, expected: int | None = None, **environ: str) -> list[str]:
    found = lines(node.of_gpus(nvml, environ, expected))
    assert nvml.open == 0
    return found


def test_nothing_is_wrong_with_good_gpus(nvml: Nvml) -> None:
    assert of_gpus(nvml) == []
    assert of_gpus(nvml, 4) == []


def test_what_the_driver_says_keeps_a_node_out(nvml: Nvml) -> None:
    nvml[0].action = 1
    nvml[1].rows = (3, 2, 1, 0)
    nvml[2].rows = (3, 2, 0, 1)
    nvml[3].uncorrected = 2
    found = of_gpus(nvml)
    words = (
        "GPU 0: the driver asks for GPU_RESET",
        "GPU 1: a defective row of its memory is remapped only by a reset",
        "GPU 2: a defective row of its memory could not be remapped",
        "GPU 3: 2 uncorrected memory errors since its last reset",
    )
    assert len(found) == len(words)
    assert all(line.startswith(word) for line, word in zip(found, words, strict=True)), found


def test_what_a_gpu_or_its_driver_does_not_tell_is_left_out(nvml: Nvml) -> None:
    for gpu in (nvml[0], nvml[1]):
        gpu.action = None
        gpu.rows = gpu.uncorrected = NvmlError(nvml.NVML_ERROR_NOT_SUPPORTED)
    nvml[1].rows = nvml[1].uncorrected = NvmlError(nvml.NVML_ERROR_NO_PERMISSION)
    nvml.gpus[2] = NvmlError(nvml.NVML_ERROR_NO_PERMISSION)  # another container's
    assert of_gpus(nvml) == []
    del nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION  # an older package
    assert of_gpus(nvml) == []


def test_a_lost_gpu_is_found(nvml: Nvml) -> None:
    nvml.gpus[0] = NvmlError(nvml.NVML_ERROR_GPU_IS_LOST)
    nvml[3].rows = NvmlError(nvml.NVML_ERROR_RESET_REQUIRED)
    assert [line.partition(" (")[0] for line in of_gpus(nvml)] == [
        "GPU 0: it cannot be used any more",
        "GPU 3: it cannot be used any more",
    ]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0,2", []),
        ("1", [1]),
        ("GPU-3-uu, 0", [3]),
        ("GPU-7-uuid", []),
        ("-1", []),
        ("", []),
        ("x,1", []),
        ("MIG-uuid-7,1", [1]),
    ],
)
def test_only_gpus_of_the_job_count(nvml: Nvml, visible: str, expected: list[int]) -> None:
    nvml[1].uncorrected = nvml[3].uncorrected = 1
    found = of_gpus(nvml, CUDA_VISIBLE_DEVICES=visible)
    assert [int(line.partition(":")[0][-1]) for line in found] == expected


def test_fewer_gpus_than_expected(nvml: Nvml) -> None:
    (line,) = of_gpus(nvml, 8)
    assert line.startswith("4 of 8 GPUs: ")
    (line,) = of_gpus(nvml, 4, CUDA_VISIBLE_DEVICES="0,1,9,GPU-7")
    assert line.startswith("2 of 4 GPUs: ")
    assert of_gpus(nvml, 3, CUDA_VISIBLE_DEVICES="GPU-0,GPU-2-uuid,MIG-7") == []


def test_without_a_driver_only_a_number_says_that_one_is_missing(nvml: Nvml) -> None:
    nvml.has_driver = False
    assert of_gpus(nvml) == []
    (line,) = of_gpus(nvml, 8)
    assert line.startswith("0 of 8 GPUs: the driver does not answer: error 9")
    assert node.of_gpus(None, {}) == []
    (missing,) = node.of_gpus(None, {}, 1)
    assert "nvidia-ml-py is not installed" in missing.why


# The kernel's log ------------------------------------------------------------------------------------------

XID = "4,1729,5100000,-;NVRM: Xid (PCI:0000:65:00): {}, pid=4711, GPU has fallen off the bus."


def test_xids_that_a_reset_takes_are_found_once() -> None:
    log = [
        "6,1,0,-;Linux version 6.1",
        *[XID.format(79)] * 3,
        XID.format(48).replace("65", "66"),
        *(XID.format(number) for number in (13, 31, 43, 45, 63, 94)),  # of programs, or handled
    ]
    assert [line.partition(":")[0] for line in lines(node.xids(log))] == [
        "Xid 79 of the GPU at PCI",
        "Xid 48 of the GPU at PCI",
    ]
    assert "Xid 79 of the GPU at PCI:0000:65:00: " in lines(node.xids(log))[0]


def test_the_kernels_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "kmsg"
    log.write_text("one\ntwo\n")
    assert node._read_kmsg(str(log)) == ["one", "two"]

    def refuse(path: str) -> list[str]:
        raise PermissionError(path)

    monkeypatch.setattr(node, "_read_kmsg", refuse)
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: types.SimpleNamespace(stdout=b"[ 1.0] three\n[ 2.0] four")
    )
    assert node.kernel_log() == ["[ 1.0] three", "[ 2.0] four"]

    def fail(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(1, "dmesg")

    monkeypatch.setattr(subprocess, "run", fail)
    assert node.kernel_log() == []


def test_this_kernels_log_is_no_error() -> None:
    assert isinstance(node.kernel_log(), list)


# The network -----------------------------------------------------------------------------------------------


class Sys:
    """A ``/sys`` with network cards."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def card(
        self, name: str, *, carrier: str = "1", flags: str = "0x1003", received: int = 9, bus: str = "pci"
    ) -> Path:
        """A card that works; one without a bus is not of hardware."""
        card = self.root / "class" / "net" / name
        (card / "statistics").mkdir(parents=True)
        (card / "carrier").write_text(f"{carrier}\n")
        (card / "flags").write_text(f"{flags}\n")
        (card / "statistics" / "rx_bytes").write_text(f"{received}\n")
        if bus:
            (self.root / "bus" / bus).mkdir(parents=True, exist_ok=True)
            device = self.root / "devices" / name
            device.mkdir(parents=True)
            (device / "subsystem").symlink_to(self.root / "bus" / bus)
            (card / "device").symlink_to(device)
        return card

    def port(
        self, card: str, state: str = "4: ACTIVE", *, layer: str = "InfiniBand", received: int = 9
    ) -> Path:
        port = self.root / "class" / "infiniband" / card / "ports" / "1"
        (port / "counters").mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "counters" / "port_rcv_data").write_text(f"{received}\n")
        return port


@pytest.fixture
def sys_folder(tmp_path: Path) -> Sys:
    return Sys(tmp_path)


def test_a_card_that_has_lost_its_link(sys_folder: Sys) -> None:
    sys_folder.card("eth0")
    sys_folder.card("eth1", carrier="0")
    (line,) = lines(node.links(sys_folder.root))
    assert line.startswith("no link on eth1: ")


def test_cards_without_a_link_on_good_machines(sys_folder: Sys) -> None:
    sys_folder.card("eth1", carrier="0", received=0)  # no cable
    (
        sys_folder.card("eth2", carrier="0", flags="0x1002") / "carrier"
    ).unlink()  # switched off: cannot be read
    sys_folder.card("eth3", carrier="0", flags="0x1002")
    sys_folder.card("usb0", carrier="0", bus="usb")  # of the board's management
    sys_folder.card("docker0", carrier="0", bus="")
    (sys_folder.card("wlan0", carrier="0") / "wireless").mkdir()
    assert lines(node.links(sys_folder.root)) == []
    assert lines(node.links(sys_folder.root / "nothing")) == []


def test_a_port_that_is_not_active_any_more(sys_folder: Sys) -> None:
    sys_folder.port("mlx5_0")
    sys_folder.port("mlx5_1", "1: DOWN")
    sys_folder.port("mlx5_2", "2: INIT")
    assert [line.partition(":")[0] for line in lines(node.ports(sys_folder.root))] == [
        "port 1 of mlx5_1 is DOWN",
        "port 1 of mlx5_2 is INIT",
    ]


def test_ports_that_are_not_active_on_good_machines(sys_folder: Sys) -> None:
    sys_folder.port("mlx5_0", "1: DOWN", received=0)  # no cable
    sys_folder.port("mlx5_1", "1: DOWN", layer="Ethernet")  # a card among the others
    (sys_folder.port("mlx5_2") / "state").unlink()
    counts_nothing = sys_folder.port("hfi1_0", "1: DOWN") / "counters" / "port_rcv_data"
    counts_nothing.write_text("N/A (no PMA)\n")  # as older kernels say
    assert lines(node.ports(sys_folder.root)) == []
    assert lines(node.ports(sys_folder.root / "nothing")) == []


def test_this_machine_has_its_links() -> None:
    assert lines([*node.links(Path("/sys")), *node.ports(Path("/sys"))]) == []


# Files, and all together -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "free", "least", "is_full"),
    [
        (100 * GIB, 0, None, True),
        (100 * GIB, 15 * MIB, None, True),
        (100 * GIB, 17 * MIB, None, False),
        (64 * MIB, 7 * MIB, None, False),  # a small one, as a container's
        (64 * MIB, 6 * MIB, None, True),
        (0, 0, None, False),  # it does not tell
        (100 * GIB, 19 * GIB, 20.0, True),
        (100 * GIB, 20 * GIB, 20.0, False),
    ],
)
def test_a_file_system_is_full(
    total: int, free: int, least: float | None, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(total=total, free=free))
    found = [node.disk("/work", least), node.shared_memory((total, free), least)]
    assert [finding is not None for finding in found] == [is_full, is_full]
    if is_full:
        first, second = lines(finding for finding in found if finding is not None)
        assert " free in /work: " in first and " free in /dev/shm: " in second


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert node.look({"shm": None}) == []
    assert "no /dev/shm" in lines(node.look({"shm": 8.0}))[0]
    assert node.look({"disk": 8.0}) == []


def test_folders_that_cannot_be_written_to_are_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(total=GIB, free=0))
    assert lines(node.look({"disk": None})) != []
    monkeypatch.setattr(os, "access", lambda path, _: str(path) != str(tmp_path))
    assert str(tmp_path) not in str(lines(node.look({"disk": None})))


def test_all_checks_are_called_by_their_names(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> None:
    nvml[0].uncorrected = 1
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(node.time, "time", lambda: 0.0)
    monkeypatch.setattr(node, "_is_clock_synchronized", lambda: False)
    monkeypatch.setattr(node, "kernel_log", lambda: [XID.format(79)])
    monkeypatch.setattr(node, "links", lambda _: iter([Finding("link", "why", "remedy")]))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(total=GIB, free=0))
    words = {
        "gpus": "GPU 0: 1 uncorrected",
        "disk": "0 MiB free in ",
        "shm": "0 MiB free in /dev/shm",
        "clock": "the clock says 1970",
        "links": "link: why",
        "xids": "Xid 79",
        "ntp": "the clock says 1970",
    }
    assert words.keys() == {*node.AUTO, *node.NAMED_ONLY}
    for name, word in words.items():
        first = lines(node.look({name: None}, {}))[0]
        assert first.startswith(word), first
    monkeypatch.setattr(node.time, "time", lambda: 1_800_000_000.0)
    assert node.look({"clock": None}) == []
    assert "not synchronized" in lines(node.look({"ntp": None}))[0]


def test_nothing_keeps_this_machine_out_by_itself() -> None:
    assert lines(node.look(node.parse("auto"))) == []


# What the option takes -------------------------------------------------------------------------------------


def test_names_and_numbers(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    auto = dict.fromkeys(node.AUTO)
    assert node.parse("auto") == auto
    assert node.parse("none") == {}
    assert node.parse("links, xids") == {"links": None, "xids": None}
    assert node.parse("auto,links,gpus=8") == {**auto, "links": None, "gpus": 8.0}
    assert node.parse("disk=0.5,auto") == {**auto, "disk": 0.5}
    assert node.parse("disk=20,disk") == {"disk": 20.0}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("gpu", "there is no 'gpu'; use none, or of auto, gpus, disk"),
        ("none,links", "there is no 'none'"),
        ("", "there is no ''"),
        ("links=2", "links=2: takes no number"),
        ("disk=much", "disk=much: give a number, GiB"),
        ("disk=-1", "disk=-1: give a number"),
        ("gpus=1.5", "gpus=1.5: give a number, how many"),
        ("shm=inf", "shm=inf: give a number"),
    ],
)
def test_wrong_names_and_numbers(text: str, word: str, monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with pytest.raises(ValueError, match=r"there is no|takes no|give a") as error:
        node.parse(text)
    assert str(error.value).startswith(word)


def test_gpus_are_not_asked_for_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.importlib.util, "find_spec", lambda _: None)
    assert "gpus" in node.parse("auto")
    with pytest.raises(ValueError, match="nvidia-ml-py: pip install"):
        node.parse("gpus=8")


def test_ftrun_check_says_what_would_keep_this_node_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_set_up_logging", lambda _: None)  # it would stay
    monkeypatch.setattr(check, "preflight", lambda *_, **__: [])
    monkeypatch.setattr(node, "kernel_log", lambda: [XID.format(79)])
    assert main(["--check", "-m", "json.tool"]) == 0
    assert main(["--check", "--node-checks", "xids", "--node-check", "echo it runs", "-m", "json.tool"]) == 1
    said = capsys.readouterr().out
    assert "Xid 79 of the GPU at PCI:0000:65:00: " in said
    assert "it runs" not in said

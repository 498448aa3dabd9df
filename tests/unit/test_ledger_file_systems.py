"""Network file systems are told from local ones by the table of mounts, and refused for writing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hypotheses.ledger import Ledger, LedgerStorageError, file_systems
from hypotheses.ledger.file_systems import Mount, find_mount, mount_of, read_mounts
from tests.ledger_builders import new_campaign, new_program

TABLE = r"""
22 1 0:27 / / rw,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c
23 22 0:21 / /proc rw,nosuid shared:5 - proc proc rw
24 22 0:22 / /tmp rw - tmpfs tmpfs rw,size=1024k
25 22 0:50 / /home rw,relatime shared:30 master:1 - nfs4 server:/export/home rw,vers=4.2,addr=10.0.0.1
26 25 8:1 /scratch /home/ada/local rw - ext4 /dev/sda1 rw
27 22 0:51 / /mnt/with\040space\134and\011tab rw - cifs //server/share\040one rw
28 22 0:52 / /mnt/remote rw - fuse.sshfs ada@host: rw,user_id=0
29 22 0:53 / /mnt/ntfs rw - fuseblk /dev/sdb1 rw
30 22 0:54 / /mnt/image rw - fuse.squashfuse squashfuse ro
31 22 0:50 /ada/runs /srv/runs rw - nfs4 server:/export/home/ada/runs rw
32 22 0:55 / /stack rw - nfs4 server:/below rw
33 32 0:56 / /stack rw - xfs /dev/sdc1 rw
34 22 0:57 / /hidden/deep rw - xfs /dev/sdd1 rw
35 22 0:58 / /hidden rw - nfs server:/above rw
this line is none
36 22 0:59
"""


@pytest.mark.parametrize(
    ("path", "point", "kind", "is_network"),
    [
        ("/", "/", "overlay", False),
        ("/var/runs/ledger.sqlite", "/", "overlay", False),
        ("/tmp/run/ledger.sqlite", "/tmp", "tmpfs", False),
        ("/tmpfile", "/", "overlay", False),
        ("/home", "/home", "nfs4", True),
        ("/home/ada/runs/ledger.sqlite", "/home", "nfs4", True),
        ("/home/ada/local/ledger.sqlite", "/home/ada/local", "ext4", False),
        ("/home/ada/locals/ledger.sqlite", "/home", "nfs4", True),
        ("/mnt/with space\\and\ttab/ledger.sqlite", "/mnt/with space\\and\ttab", "cifs", True),
        ("/mnt/remote/x", "/mnt/remote", "fuse.sshfs", True),
        ("/mnt/ntfs/x", "/mnt/ntfs", "fuseblk", False),
        ("/mnt/image/x", "/mnt/image", "fuse.squashfuse", False),
        ("/srv/runs/x", "/srv/runs", "nfs4", True),
        ("/stack/x", "/stack", "xfs", False),
        ("/hidden/deep/x", "/hidden", "nfs", True),
    ],
)
def test_a_path_lies_on_the_mount_that_the_kernel_walks_into(
    path: str, point: str, kind: str, is_network: bool
) -> None:
    mount = mount_of(path, read_mounts(TABLE))
    assert mount is not None
    assert (mount.point, mount.kind, mount.is_network) == (point, kind, is_network)


def test_lines_that_are_none_are_passed_over() -> None:
    mounts = read_mounts(TABLE)
    assert [mount.id for mount in mounts] == list(range(22, 36))
    assert next(mount.source for mount in mounts if mount.kind == "cifs") == "//server/share one"
    assert mount_of("/x", []) is None


@pytest.mark.parametrize(
    "kind",
    [
        "nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "gpfs", "beegfs", "afs", "ceph", "glusterfs",
        "fuse.glusterfs", "fuse.s3fs", "fuse.rclone", "vboxsf", "ocfs2",
    ],
)  # fmt: skip
def test_network_kinds(kind: str) -> None:
    assert Mount(1, 0, "/", kind, "server").is_network


@pytest.mark.parametrize(
    "kind",
    ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "f2fs", "virtiofs", "fuse", "fuse.fuse-overlayfs", "fuse.x"],
)
def test_local_kinds(kind: str) -> None:
    assert not Mount(1, 0, "/", kind, "device").is_network


def test_this_host_says_where_a_folder_lies(tmp_path: Path) -> None:
    mount = find_mount(tmp_path / "ledger.sqlite")
    assert mount is not None
    assert tmp_path.is_relative_to(mount.point)


def test_a_link_is_followed_to_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 0:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:2 / {tmp_path}/far rw - nfs server:/x rw\n")
    monkeypatch.setattr(file_systems, "MOUNTINFO", table)
    mount = find_mount(tmp_path / "near" / "ledger.sqlite")
    assert mount is not None
    assert mount.kind == "nfs"


def test_where_the_host_does_not_tell_everything_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "MOUNTINFO", tmp_path / "nowhere")
    assert find_mount(tmp_path) is None
    Ledger.create(tmp_path / "ledger.sqlite", new_campaign()).close()


def test_writing_is_refused_and_reading_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path, new_campaign()) as ledger:
        ledger.add_program(new_program())
    with Ledger.open(path, read_only=True):
        assert caplog.records == []
    monkeypatch.setattr(file_systems, "find_mount", lambda path: Mount(2, 1, "/net", "nfs4", "server:/export"))
    told = r"is on a network file system \(nfs4, server:/export at /net\).*put the run into a local folder with --out"
    before = sorted(item.name for item in tmp_path.iterdir())
    with pytest.raises(LedgerStorageError, match=told):
        Ledger.open(path)
    with pytest.raises(LedgerStorageError, match=told):
        Ledger.create(tmp_path / "other.sqlite", new_campaign())
    assert sorted(item.name for item in tmp_path.iterdir()) == before
    with caplog.at_level(logging.WARNING), Ledger.open(path, read_only=True) as reader:
        assert len(reader.programs()) == 1
    assert [record.name for record in caplog.records] == ["hypotheses.ledger"]
    assert "nfs4, server:/export at /net" in caplog.text

//! File systems of a test's own: one that is small, and one whose power can be cut.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A file system mounted below a temporary directory until it is dropped. Needs to be root.
pub(crate) struct Mount {
    directory: TempDir,
    root: String,
}

impl Mount {
    /// In memory, with room for so much.
    pub(crate) fn tmpfs(mebibytes: u32) -> Mount {
        let mount = Mount::prepared();
        shell("mount", &["-t", "tmpfs", "-o", &format!("size={mebibytes}m"), "skeg-test", &mount.root]);
        mount
    }

    /// Gives a file system in memory another size.
    pub(crate) fn resize(&self, mebibytes: u32) {
        shell("mount", &["-o", &format!("remount,size={mebibytes}m"), &self.root]);
    }

    /// Ext4 in a file, over a loop device.
    pub(crate) fn ext4(mebibytes: u32) -> Mount {
        let mount = Mount::prepared();
        shell(
            "truncate",
            &["-s", &format!("{mebibytes}M"), mount.image().to_str().expect("a path in UTF-8")],
        );
        shell("mkfs.ext4", &["-q", "-F", mount.image().to_str().expect("a path in UTF-8")]);
        mount.attach();
        mount
    }

    /// Cuts the power: what was not synced is gone, and every later access fails until [`Mount::power_on`].
    pub(crate) fn power_off(&self) {
        // EXT4_IOC_SHUTDOWN without flushing the journal, as fstests does it.
        let code = "import fcntl,os,struct,sys\n\
            fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587d, struct.pack('I', 2))";
        shell("python3", &["-c", code, &self.root]);
    }

    /// Mounts it again, as after a boot. Nothing may hold a file of it open.
    pub(crate) fn power_on(&self) {
        shell("umount", &[&self.root]);
        self.attach();
    }

    /// The root of the file system.
    pub(crate) fn path(&self) -> &Path {
        Path::new(&self.root)
    }

    fn prepared() -> Mount {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let root = directory.path().join("root");
        std::fs::create_dir(&root).expect("an empty directory takes another");
        Mount { root: root.to_str().expect("a path in UTF-8").to_owned(), directory }
    }

    fn attach(&self) {
        shell("mount", &["-o", "loop", self.image().to_str().expect("a path in UTF-8"), &self.root]);
    }

    fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A test that failed may still have a process in it: then it goes when that ends.
        let _ = Command::new("umount").args(["--lazy", &self.root]).status();
    }
}

#[track_caller]
fn shell(program: &str, arguments: &[&str]) {
    let output =
        Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

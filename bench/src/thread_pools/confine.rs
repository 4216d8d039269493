//! confine: a control group (version 1 or 2) with little memory and a slow disk, and a disk with a tiny queue.
//!
//! Unavailable limits are skipped and reported. Everything is removed on drop; processes in the group must have exited
//! by then.

use std::fs;
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Mount point of control groups.
const HIERARCHY: &str = "/sys/fs/cgroup";
/// Limit of version 1: a device, and bytes per second for reads.
const READ_BPS: &str = "blkio.throttle.read_bps_device";

#[derive(Debug, Default)]
pub struct Cage {
    groups: Vec<PathBuf>,
    pub limits_memory: bool,
    pub limits_disk: bool,
    /// Limits that the measurement lacks, each described in a sentence.
    pub left_out: Vec<String>,
}

pub type Device = (u32, u32);

impl Cage {
    /// Makes a group with these limits for memory and for reads from each device.
    pub fn build(memory_bytes: u64, devices: &[Device], read_bytes_per_second: u64) -> Cage {
        let mut cage = Cage::default();
        if !rustix::process::geteuid().is_root() {
            cage.left_out.push(
                "Not run as root: without a control group, memory and disk are not limited, and most files of client 1 \
                 are soon in memory. Run it as root (in a virtual machine, for example) for the experiment itself."
                    .to_owned(),
            );
            return cage;
        }
        cage.enter(Path::new(HIERARCHY), memory_bytes, devices, read_bytes_per_second);
        cage
    }

    /// Changes the limit for reads from a device. It also applies to waiting reads.
    pub fn hold_reads(&self, (major, minor): Device, bytes_per_second: u64) -> Result<(), String> {
        let device = format!("{major}:{minor}");
        let [new, old] = [
            ("io.max", format!("{device} rbps={bytes_per_second}")),
            (READ_BPS, format!("{device} {bytes_per_second}")),
        ];
        for (file, text) in [new, old] {
            for path in self.groups.iter().map(|group| group.join(file)).filter(|path| path.exists()) {
                fs::write(&path, &text).map_err(|error| format!("{}: {error}", path.display()))?;
            }
        }
        Ok(())
    }

    /// Creates the groups below this directory, in the version available.
    fn enter(&mut self, root: &Path, memory_bytes: u64, devices: &[Device], read_bytes_per_second: u64) {
        let name = format!("gale-bench-{}", std::process::id());
        if devices.is_empty() {
            self.left_out
                .push("The data set lies on no block device of its own: its reads are not throttled.".to_owned());
        }
        if !root.join("cgroup.controllers").exists() {
            let memory = self.version_1(root, "memory", &name, "memory.limit_in_bytes", &[memory_bytes.to_string()]);
            let limits: Vec<String> =
                devices.iter().map(|(major, minor)| format!("{major}:{minor} {read_bytes_per_second}")).collect();
            let disk = (!limits.is_empty()).then(|| self.version_1(root, "blkio", &name, READ_BPS, &limits)).flatten();
            self.limits_memory = memory.is_some();
            self.limits_disk = disk.is_some();
            return self.groups.extend(memory.into_iter().chain(disk));
        }
        let group = root.join(&name);
        remove_left_over(&group);
        // The root must delegate controllers before they can be set below it.
        self.note("cgroup.subtree_control", fs::write(root.join("cgroup.subtree_control"), "+memory +io"));
        let made = fs::create_dir(&group);
        if made.is_ok() {
            let limited = fs::write(group.join("memory.max"), memory_bytes.to_string());
            self.limits_memory = self.note("memory.max", limited);
            for (major, minor) in devices {
                let limited = fs::write(group.join("io.max"), format!("{major}:{minor} rbps={read_bytes_per_second}"));
                self.limits_disk = self.note("io.max", limited);
            }
            self.groups.push(group);
        }
        self.note("control group", made);
    }

    /// Creates a group of one controller of version 1 and writes values to one of its files.
    fn version_1(
        &mut self,
        root: &Path,
        controller: &str,
        name: &str,
        file: &str,
        values: &[String],
    ) -> Option<PathBuf> {
        let group = root.join(controller).join(name);
        remove_left_over(&group);
        let write = || values.iter().try_for_each(|value| fs::write(group.join(file), value));
        let made = fs::create_dir(&group).and_then(|()| write());
        if self.note(file, made) {
            return Some(group);
        }
        // The group is removed at once, so drop has nothing to remove.
        let _ = fs::remove_dir(&group);
        None
    }

    /// Returns true on success, else records the failure.
    fn note(&mut self, what: &str, result: std::io::Result<()>) -> bool {
        if let Err(error) = &result {
            self.left_out.push(format!("{what} cannot be set ({error}): the measurement goes without it."));
        }
        result.is_ok()
    }

    /// Returns the arguments in front of a command that start it in the group.
    pub fn words(&self) -> Vec<String> {
        let mut words: Vec<String> = ["sh", "-c", ENTER, "enter"].map(str::to_owned).to_vec();
        words.extend(self.groups.iter().map(|group| group.join("cgroup.procs").display().to_string()));
        words.push("--".to_owned());
        words
    }
}

/// Removes the empty group of an earlier process with the same number, which was killed.
fn remove_left_over(group: &Path) {
    let _ = fs::remove_dir(group);
}

/// Writes the shell's process number to each file up to `--`, then executes the command after it.
const ENTER: &str = "while [ \"$1\" != -- ]; do echo $$ > \"$1\" || exit; shift; done; shift; exec \"$@\"";

impl Drop for Cage {
    fn drop(&mut self) {
        // After processes have exited, the kernel needs a moment.
        let deadline = Instant::now() + Duration::from_secs(5);
        for group in &self.groups {
            while fs::remove_dir(group).is_err() && group.exists() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Returns the block device of a directory; for a partition, the whole device.
pub fn device_of(directory: &Path) -> Option<Device> {
    let number = fs::metadata(directory).ok()?.st_dev();
    let device = (rustix::fs::major(number), rustix::fs::minor(number));
    let node = fs::canonicalize(format!("/sys/dev/block/{}:{}", device.0, device.1)).ok()?;
    if !node.join("partition").exists() {
        return Some(device);
    }
    let text = fs::read_to_string(node.parent()?.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Returns the read-ahead of a device in KiB, which affects the cost of a cold read.
pub fn read_ahead_kib((major, minor): Device) -> Option<u64> {
    let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/queue/read_ahead_kb")).ok()?;
    text.trim().parse().ok()
}

/// Returns the bytes read from a device since boot.
pub fn bytes_read((major, minor): Device) -> Option<u64> {
    let text = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok()?;
    // In sectors of 512 bytes, independent of the device.
    Some(text.split_ascii_whitespace().nth(2)?.parse::<u64>().ok()? * 512)
}

/// A file system in an image file, on a loop device with a very short queue.
#[derive(Debug)]
pub struct SmallDisk {
    image: PathBuf,
    device: String,
    pub mount_point: PathBuf,
    is_mounted: bool,
}

/// Minimum that the kernel allows.
const QUEUE_REQUESTS: u32 = 4;

impl SmallDisk {
    pub fn make(directory: &Path, bytes: u64) -> Result<SmallDisk, String> {
        SmallDisk::named(directory, "disk", bytes)
    }

    /// Makes one of several disks in a directory.
    pub fn named(directory: &Path, name: &str, bytes: u64) -> Result<SmallDisk, String> {
        let image = directory.join(format!("{name}.image"));
        let mount_point = directory.join(name);
        let fault = |error: std::io::Error| format!("{}: {error}", image.display());
        fs::File::create(&image).and_then(|file| file.set_len(bytes)).map_err(fault)?;
        fs::create_dir_all(&mount_point).map_err(fault)?;
        let mut disk = SmallDisk { image, device: String::new(), mount_point, is_mounted: false };
        let path = disk.image.display().to_string();
        // An inode per block, for data sets that consist of small files.
        run(&["mkfs.ext4", "-q", "-F", "-i", "4096", &path])?;
        // Direct I/O, so that the image is not in the page cache as well.
        disk.device = run(&["losetup", "--find", "--show", "--direct-io=on", &path])?.trim().to_owned();
        disk.mount()?;
        let name = disk.device.trim_start_matches("/dev/").to_owned();
        let queue = format!("/sys/block/{name}/queue/nr_requests");
        fs::write(&queue, QUEUE_REQUESTS.to_string()).map_err(|error| format!("{queue}: {error}"))?;
        Ok(disk)
    }

    fn mount(&mut self) -> Result<(), String> {
        run(&["mount", &self.device, &self.mount_point.display().to_string()])?;
        self.is_mounted = true;
        Ok(())
    }

    /// Remounts the file system, which drops its contents and names from memory.
    pub fn forget(&mut self) -> Result<(), String> {
        run(&["umount", &self.mount_point.display().to_string()])?;
        self.is_mounted = false;
        self.mount()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Undoes the steps that were completed. Failures are reported by the commands.
        if self.is_mounted {
            let _ = run(&["umount", &self.mount_point.display().to_string()]).inspect_err(|error| eprintln!("{error}"));
        }
        if !self.device.is_empty() {
            let _ = run(&["losetup", "--detach", &self.device]).inspect_err(|error| eprintln!("{error}"));
        }
        let _ = fs::remove_file(&self.image);
    }
}

fn run(words: &[&str]) -> Result<String, String> {
    let output = Command::new(words[0]).args(&words[1..]).output().map_err(|error| format!("{}: {error}", words[0]))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An imitation of the root of control groups.
    struct Hierarchy(PathBuf);

    impl Hierarchy {
        fn new(name: &str, entries: &[&str]) -> Hierarchy {
            let root = std::env::temp_dir().join(format!("gale-bench-{name}-{}", std::process::id()));
            fs::create_dir_all(&root).unwrap();
            entries.iter().for_each(|entry| fs::create_dir(root.join(entry)).unwrap());
            Hierarchy(root)
        }

        fn cage(&self, device: Option<Device>) -> Cage {
            let mut cage = Cage::default();
            cage.enter(&self.0, 1 << 30, device.as_slice(), 5000);
            cage
        }

        /// Returns the contents of a file in this process's group.
        fn text(&self, controller: &str, file: &str) -> String {
            let group = self.0.join(controller).join(format!("gale-bench-{}", std::process::id()));
            fs::read_to_string(group.join(file)).unwrap_or_default()
        }
    }

    impl Drop for Hierarchy {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn version_2_has_one_group_with_all_controllers() {
        let hierarchy = Hierarchy::new("v2", &[]);
        fs::write(hierarchy.0.join("cgroup.controllers"), "memory io").unwrap();
        let cage = hierarchy.cage(Some((8, 16)));
        assert!(cage.left_out.is_empty() && cage.limits_memory && cage.limits_disk, "{cage:?}");
        assert_eq!(fs::read_to_string(hierarchy.0.join("cgroup.subtree_control")).unwrap(), "+memory +io");
        assert_eq!(
            (hierarchy.text("", "memory.max"), hierarchy.text("", "io.max")),
            ((1u64 << 30).to_string(), "8:16 rbps=5000".to_owned())
        );
        // A command enters the group before it runs.
        let words = cage.words();
        let output = Command::new(&words[0]).args(&words[1..]).args(["echo", "inside"]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "inside\n");
        assert!(hierarchy.text("", "cgroup.procs").trim().parse::<u32>().is_ok());
        drop(hierarchy);
    }

    #[test]
    fn version_1_has_a_group_for_each_controller() {
        let hierarchy = Hierarchy::new("v1", &["memory", "blkio"]);
        let cage = hierarchy.cage(Some((8, 16)));
        assert!(cage.left_out.is_empty() && cage.groups.len() == 2, "{cage:?}");
        assert_eq!(hierarchy.text("memory", "memory.limit_in_bytes"), (1u64 << 30).to_string());
        assert_eq!(hierarchy.text("blkio", "blkio.throttle.read_bps_device"), "8:16 5000");
        drop(hierarchy);
    }

    #[test]
    fn missing_controller_is_named_and_not_entered() {
        let hierarchy = Hierarchy::new("none", &["memory"]);
        let cage = hierarchy.cage(Some((8, 16)));
        assert!(cage.left_out.len() == 1 && cage.left_out[0].starts_with("blkio.throttle.read_bps_device"), "{cage:?}");
        assert!(cage.limits_memory && !cage.limits_disk);
        let without_disk = hierarchy.cage(None);
        assert!(without_disk.left_out[0].contains("not throttled"), "{without_disk:?}");
        drop(hierarchy);
        // A hierarchy of version 2 without write access.
        let mut cage = Cage::default();
        let readonly = Hierarchy::new("readonly", &[]);
        fs::write(readonly.0.join("cgroup.controllers"), "").unwrap();
        fs::write(readonly.0.join(format!("gale-bench-{}", std::process::id())), "a file").unwrap();
        cage.enter(&readonly.0, 1, &[], 1);
        assert!(
            cage.groups.is_empty() && cage.left_out.iter().any(|text| text.starts_with("control group")),
            "{cage:?}"
        );
        let words = cage.words();
        assert!(Command::new(&words[0]).args(&words[1..]).arg("true").status().unwrap().success());
    }
}

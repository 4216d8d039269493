//! How much memory this process may use: the machine's, or what its cgroups allow if that is less. Read once, from
//! files in memory; a limit that is changed later is not noticed.

use std::path::Path;
use std::sync::OnceLock;

const MIB: u64 = 1 << 20;

/// Leases of all loops together, and of each: less than one request with a large header and body needs is of no use.
const LEASES_MIN: u64 = 64 * MIB;
const LEASES_MIN_PER_LOOP: u64 = 4 * MIB;

/// The bytes that each of so many loops may have on lease if nothing else is said.
pub(crate) fn share_of_leases(loops: usize) -> usize {
    share(available(), loops as u64)
}

/// The bytes that may be charged to the process if nothing else is said: a sixteenth of the memory, as much as a
/// quarter of what all loops have on lease.
pub(crate) fn share_of_shared_bytes() -> usize {
    share(available() / 4, 1)
}

fn available() -> u64 {
    static AVAILABLE: OnceLock<u64> = OnceLock::new();
    *AVAILABLE.get_or_init(|| physical_bytes().min(cgroup_limit().unwrap_or(u64::MAX)))
}

fn share(available: u64, loops: u64) -> usize {
    let all = (available / 4).max(LEASES_MIN);
    usize::try_from((all / loops.max(1)).max(LEASES_MIN_PER_LOOP)).unwrap_or(usize::MAX)
}

#[allow(clippy::unnecessary_cast)] // The types of these fields differ between architectures.
fn physical_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(info.mem_unit.into())
}

/// The smallest limit of the process's cgroup and those around it that can be seen; `None` where there is none.
fn cgroup_limit() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    table
        .lines()
        .filter_map(memory_directory_and_file)
        .filter_map(|(root, path, file)| limit_above(root, path, file))
        .min()
}

/// One line of /proc/self/cgroup (cgroups(7)), `0::/path` or, in version 1, `5:memory:/path`: where the hierarchy is
/// mounted by convention, the path therein, and the name of the file that tells the limit.
fn memory_directory_and_file(line: &str) -> Option<(&'static Path, &Path, &'static str)> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let path = Path::new(path.strip_prefix('/')?);
    match controllers {
        "" => Some((Path::new("/sys/fs/cgroup"), path, "memory.max")),
        _ if controllers.split(',').any(|controller| controller == "memory") => {
            Some((Path::new("/sys/fs/cgroup/memory"), path, "memory.limit_in_bytes"))
        }
        _ => None,
    }
}

fn limit_above(root: &Path, path: &Path, file: &str) -> Option<u64> {
    // In a container the path may be that of the host and not exist; the container's own limit is then at the root.
    let limits = path.ancestors().filter_map(|part| std::fs::read_to_string(root.join(part).join(file)).ok());
    // "max" is no number, and no limit.
    limits.filter_map(|limit| limit.trim_end().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_share_a_quarter_of_the_memory_with_a_floor() {
        assert_eq!(share(16 << 30, 4), 1 << 30);
        assert_eq!(share(128 * MIB, 1) as u64, 64 * MIB);
        assert_eq!(share(128 * MIB, 64) as u64, 4 * MIB);
        assert_eq!(share(0, 0) as u64, 64 * MIB);
    }

    #[test]
    fn the_memory_cgroup_is_found_in_both_versions() {
        let found = memory_directory_and_file("0::/system.slice/gale.service").unwrap();
        assert_eq!(found, (Path::new("/sys/fs/cgroup"), Path::new("system.slice/gale.service"), "memory.max"));
        let found = memory_directory_and_file("5:cpuset,memory:/").unwrap();
        assert_eq!(found, (Path::new("/sys/fs/cgroup/memory"), Path::new(""), "memory.limit_in_bytes"));
        assert_eq!(memory_directory_and_file("4:cpu,cpuacct:/"), None);
        assert_eq!(memory_directory_and_file("nonsense"), None);
    }

    #[test]
    fn the_smallest_limit_on_the_way_up_counts() {
        let root = std::env::temp_dir().join(format!("gale-memory-{}", std::process::id()));
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/memory.max"), "300\n").unwrap();
        std::fs::write(root.join("a/b/memory.max"), "max\n").unwrap();
        std::fs::write(root.join("memory.max"), "500\n").unwrap();
        let limit = limit_above(&root, Path::new("a/b"), "memory.max");
        let elsewhere = limit_above(&root, Path::new("x/y"), "memory.max");
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!((limit, elsewhere), (Some(300), Some(500)));
    }
}

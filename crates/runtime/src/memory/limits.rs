//! Memory that this process may use: the machine's, or the limit of its cgroups if that is lower. Read once, from files
//! in memory; later changes of a limit are not noticed.

use std::path::Path;
use std::sync::OnceLock;

const MIB: u64 = 1 << 20;

/// Minimum of leased bytes of all loops, and of each: one request with a large header and body must fit.
const LEASES_MIN: u64 = 64 * MIB;
const LEASES_MIN_PER_LOOP: u64 = 4 * MIB;

/// Default limit of leased bytes of each of `loops` loops.
pub(crate) fn share_of_leases(loops: usize) -> usize {
    share(available(), loops as u64)
}

/// Default limit of bytes charged to the process: a sixteenth of the memory, which is a quarter of the limit of all
/// loops' leases.
pub(crate) fn share_of_shared_bytes() -> usize {
    share(available() / 4, 1)
}

/// Bytes of memory that this process may use.
pub fn available() -> u64 {
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

/// The lowest limit of the process's cgroup and its visible ancestors; `None` without any.
fn cgroup_limit() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    table
        .lines()
        .filter_map(memory_directory_and_file)
        .filter_map(|(root, path, file)| limit_above(root, path, file))
        .min()
}

/// From a line of /proc/self/cgroup (cgroups(7)), `0::/path` or, in version 1, `5:memory:/path`: the conventional mount
/// point of the hierarchy, the path in it, and the name of the file with the limit.
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
    // In a container the path may be the host's and not exist; the container's own limit is then at the root.
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

//! Memory that the process may still take.

use std::path::Path;

/// Files of a control group: limit, use, and lines of `memory.stat` with the pages of files, which are reclaimed.
const VERSION_1: (&str, &str, [&str; 2]) =
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ["total_active_file ", "total_inactive_file "]);
const VERSION_2: (&str, &str, [&str; 2]) = ("memory.max", "memory.current", ["active_file ", "inactive_file "]);

/// `MemAvailable` of Linux in bytes, or what the process's control groups (a container's) leave if that is less; `None`
/// on other systems.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let of_system = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(left_by_groups(Path::new("/sys/fs/cgroup"), &groups).map_or(of_system, |left| left.min(of_system)))
}

/// What the limits of the control groups in `groups`, the text of `/proc/self/cgroup`, leave; `None` without limits.
fn left_by_groups(mount: &Path, groups: &str) -> Option<u64> {
    let of_line = |line: &str| {
        // `id:controllers:path`; version 2 names no controllers.
        let (_, (controllers, path)) = line.split_once(':').and_then(|(id, rest)| Some((id, rest.split_once(':')?)))?;
        let (hierarchy, files) = match controllers {
            "" => (mount.to_path_buf(), VERSION_2),
            _ if controllers.split(',').any(|name| name == "memory") => (mount.join("memory"), VERSION_1),
            _ => return None,
        };
        // A container sees its own group as the root, but the path may be that of the host.
        let groups = Path::new(path.trim_start_matches('/')).ancestors();
        groups.filter_map(|group| left(&hierarchy.join(group), files)).min()
    };
    groups.lines().filter_map(of_line).min()
}

/// What the limit of the control group in `directory` leaves.
fn left(directory: &Path, (limit, used, of_files): (&str, &str, [&str; 2])) -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(directory.join(file)).ok();
    let limit: u64 = read(limit)?.trim().parse().ok()?; // not `max`
    let used: u64 = read(used)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let of_files = stat.lines().filter_map(|line| of_files.iter().find_map(|name| line.strip_prefix(name)));
    let of_files: u64 = of_files.filter_map(|bytes| bytes.trim().parse::<u64>().ok()).sum();
    Some(limit.saturating_sub(used.saturating_sub(of_files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_of_a_group_or_its_parents_counts() {
        let mount = tempfile::tempdir().expect("a directory");
        let group = |path: &str, files: [(&str, &str); 3]| {
            let directory = mount.path().join(path);
            std::fs::create_dir_all(&directory).expect("a directory");
            files.iter().for_each(|(file, text)| std::fs::write(directory.join(file), text).expect("a file"));
        };
        let stat = "anon 1\nactive_file 30\ninactive_file 20\ntotal_active_file 7\ntotal_inactive_file 3\n";
        let version_2 = |max, current| [("memory.max", max), ("memory.current", current), ("memory.stat", stat)];
        group("a/b", version_2("max\n", "150\n"));
        group("a", version_2("1000\n", "250\n"));
        group("", version_2("5000\n", "450\n"));
        let limit = ("memory.limit_in_bytes", "600\n");
        group("memory", [limit, ("memory.usage_in_bytes", "110\n"), ("memory.stat", stat)]);

        let left = |groups: &str| left_by_groups(mount.path(), groups);
        assert_eq!(left("0::/a/b\n"), Some(1000 - (250 - 50)));
        assert_eq!(left("0::/\n"), Some(5000 - (450 - 50)));
        assert_eq!(left("0::/of/the/host\n"), Some(5000 - (450 - 50)));
        assert_eq!(left("3:cpu:/a\n4:cpuset,memory:/docker/c\n0::/a/b\n"), Some(600 - (110 - 10)));
        assert_eq!(left("3:cpu:/a\n"), None);
        assert_eq!(left("nonsense\n"), None);
        group("", version_2("100\n", "450\n"));
        assert_eq!(left("0::/a/b\n"), Some(0));
    }
}

//! Places in the file system that a worker process may access: paths of the configuration, and the directories that
//! they name at this moment.
//!
//! The kernel's rules bind to directories, not to their names, and cover everything below. So a place is identified by
//! the devices and inodes on its path from the root: a reload after which the same name is another directory needs a
//! new worker process, and one that adds a directory below a place does not.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::text;

/// Files and directories, with everything below.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Places {
    /// The whole file system: a path of the configuration begins with a variable.
    Anywhere,
    /// Only these.
    Below(BTreeSet<Place>),
}

/// TCP ports of servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ports {
    /// Any port.
    Any,
    /// Only these.
    Only(BTreeSet<u16>),
}

impl Default for Ports {
    fn default() -> Ports {
        Ports::Only(BTreeSet::new())
    }
}

impl Ports {
    /// Adds a port.
    pub fn add(&mut self, port: u16) {
        if let Ports::Only(ports) = self {
            ports.insert(port);
        }
    }

    /// True if all of `next` are among these.
    pub(crate) fn cover(&self, next: &Ports) -> bool {
        match (self, next) {
            (Ports::Any, _) => true,
            (Ports::Only(_), Ports::Any) => false,
            (Ports::Only(own), Ports::Only(next)) => next.is_subset(own),
        }
    }
}

/// A file or directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// Absolute path in the configuration; after `find`, the nearest existing directory.
    #[serde(with = "text::path")]
    path: PathBuf,
    /// Devices and inodes of the place, its parent directory, and so on; empty before it is resolved, and if nothing
    /// but the root exists.
    lineage: Vec<(u64, u64)>,
}

impl Default for Places {
    fn default() -> Places {
        Places::Below(BTreeSet::new())
    }
}

impl Places {
    /// Adds a file or a directory with everything below.
    pub fn add(&mut self, path: &Path) {
        if path == Path::new("/") {
            *self = Places::Anywhere;
        } else if let Places::Below(places) = self {
            places.insert(Place { path: path.to_owned(), lineage: Vec::new() });
        }
    }

    /// Adds the directory that contains all paths with this beginning, which ends before a variable. Returns `false` if
    /// there is no such directory, so that all places are included from now on.
    pub fn add_beginning(&mut self, beginning: &[u8]) -> bool {
        match constant_directory(beginning) {
            Some(directory) => self.add(directory),
            None => *self = Places::Anywhere,
        }
        *self != Places::Anywhere
    }

    /// Resolves the paths and opens their directories, for a missing one its nearest existing ancestor, since the
    /// missing ones may be created.
    pub(crate) fn find(&mut self) -> Vec<OpenPlace> {
        let Places::Below(places) = self else { return Vec::new() };
        let found: BTreeMap<Place, Option<OpenPlace>> = std::mem::take(places).into_iter().map(Place::find).collect();
        let mut opened = Vec::with_capacity(found.len());
        for (place, open) in found {
            places.insert(place);
            opened.extend(open);
        }
        opened
    }

    /// Resolves the paths that exist.
    pub(crate) fn find_exactly(&mut self) {
        if let Places::Below(places) = self {
            *places = std::mem::take(places).into_iter().map(Place::find_exactly).collect();
        }
    }

    /// True if all of `next` lies in these places.
    pub(crate) fn cover(&self, next: &Places) -> bool {
        match (self, next) {
            (Places::Anywhere, _) => true,
            (Places::Below(_), Places::Anywhere) => false,
            (Places::Below(own), Places::Below(next)) => {
                let own: BTreeSet<_> = own.iter().filter_map(|place| place.lineage.first()).collect();
                // A missing place is covered: it becomes reachable after another reload.
                let is_covered =
                    |place: &Place| place.lineage.is_empty() || place.lineage.iter().any(|one| own.contains(one));
                next.iter().all(is_covered)
            }
        }
    }

    /// Returns the places that were found, and the paths that do not exist.
    pub(super) fn paths(&self) -> (Vec<PathBuf>, Vec<PathBuf>) {
        let Places::Below(places) = self else { return Default::default() };
        let (found, missing): (Vec<&Place>, Vec<&Place>) = places.iter().partition(|place| !place.lineage.is_empty());
        let path = |place: &'_ &Place| -> PathBuf { place.path.clone() };
        (found.iter().map(path).collect(), missing.iter().map(path).collect())
    }
}

impl Place {
    fn find_exactly(self) -> Place {
        let lineage = self.path.canonicalize().map(|path| lineage(&path)).unwrap_or_default();
        Place { lineage, ..self }
    }

    /// Opens the path or its nearest existing ancestor, except the root.
    fn find(self) -> (Place, Option<OpenPlace>) {
        for path in self.path.ancestors().take_while(|path| path.parent().is_some()) {
            match OpenPlace::open(path) {
                Ok(open) => {
                    let lineage = open.real_path().map(|path| lineage(&path)).unwrap_or_default();
                    return (Place { path: path.to_owned(), lineage }, Some(open));
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
                Err(_) => break,
            }
        }
        (Place { lineage: Vec::new(), ..self }, None)
    }
}

/// Returns device and inode of a path without symbolic links and of all its parent directories except the root; empty
/// if one of them cannot be examined.
fn lineage(path: &Path) -> Vec<(u64, u64)> {
    let on_its_way = path.ancestors().take_while(|path| path.parent().is_some());
    let identity = |path: &Path| path.symlink_metadata().map(|metadata| (metadata.dev(), metadata.ino()));
    on_its_way.map(identity).collect::<io::Result<_>>().unwrap_or_default()
}

/// An open place. The rules of a worker process are made of these, so that it resolves no names and waits for no file
/// system.
#[derive(Clone, Debug)]
pub(crate) struct OpenPlace {
    pub descriptor: Arc<OwnedFd>,
    pub is_directory: bool,
}

impl OpenPlace {
    pub fn open(path: &Path) -> io::Result<OpenPlace> {
        let descriptor = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&descriptor)?;
        let is_directory = FileType::from_raw_mode(stat.st_mode).is_dir();
        Ok(OpenPlace { descriptor: Arc::new(descriptor), is_directory })
    }

    /// Returns its path without symbolic links.
    fn real_path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()))
    }
}

/// Returns the directory of all paths with this beginning, unless it is the root.
fn constant_directory(beginning: &[u8]) -> Option<&Path> {
    use std::os::unix::ffi::OsStrExt;
    let slash = beginning.iter().rposition(|&byte| byte == b'/')?;
    let directory = Path::new(std::ffi::OsStr::from_bytes(&beginning[..slash]));
    directory.parent().is_some().then_some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(paths: &[&Path]) -> Places {
        let mut places = Places::default();
        paths.iter().for_each(|path| places.add(path));
        let _ = places.find();
        places
    }

    #[test]
    fn beginning_of_a_path_gives_its_directory() {
        let cases: [(&[u8], Option<&str>); 6] = [
            (b"/var/log/gale/access-", Some("/var/log/gale")),
            (b"/srv/", Some("/srv")),
            (b"/data/www", Some("/data")),
            (b"/www", None),
            (b"/", None),
            (b"", None),
        ];
        for (beginning, expected) in cases {
            assert_eq!(constant_directory(beginning), expected.map(Path::new), "{}", beginning.escape_ascii());
        }
        let mut places = Places::default();
        assert!(places.add_beginning(b"/var/log/x-"));
        assert!(!places.add_beginning(b"/x-"));
        assert_eq!(places, Places::Anywhere);
    }

    #[test]
    fn missing_directory_is_the_nearest_above() {
        let places = found(&[Path::new("/proc/self/no/such/directory"), Path::new("/no-such-directory/either")]);
        let (there, missing) = places.paths();
        assert_eq!(there, [Path::new("/proc/self")]);
        assert_eq!(missing, [Path::new("/no-such-directory/either")]);
    }

    #[test]
    fn more_and_other_directories_are_not_covered() {
        let directory = std::env::temp_dir().join(format!("gale-places-{}", std::process::id()));
        let (one, two) = (directory.join("one"), directory.join("two"));
        for path in [&one, &two] {
            std::fs::create_dir_all(path).expect("room");
        }
        let both = found(&[&one, &two]);
        let first = found(&[&one]);
        assert!(both.cover(&first) && both.cover(&both));
        assert!(!first.cover(&both));
        assert!(Places::Anywhere.cover(&both) && !both.cover(&Places::Anywhere));
        let below = one.join("below");
        std::fs::create_dir(&below).expect("room");
        assert!(first.cover(&found(&[&below])) && !found(&[&below]).cover(&first));
        std::fs::rename(&two, directory.join("old")).expect("it is there");
        std::fs::create_dir(&two).expect("room");
        assert!(!both.cover(&found(&[&one, &two])), "the same name is another directory");
        std::fs::remove_dir_all(directory).expect("ours");
    }
}

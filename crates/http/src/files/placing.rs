//! Puts a complete file into its place atomically: a concurrent reader gets the old file or the new one. Everything
//! here blocks, and runs in a pool.

use std::ffi::OsString;
use std::fs::{self, FileTimes, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use gale_config::{Diagnostic, Statement};
use gale_files::{File, FileError, create_directories_blocking};
use gale_runtime::Bytes;

/// Random names tried for a temporary file. A second one is hardly ever needed.
const NAMES_MAX: u32 = 100;

/// Content of the new file.
pub struct Content {
    /// Name of the file that holds the whole content, and that may be renamed.
    pub name: Option<PathBuf>,
    /// Its beginning.
    pub memory: Vec<Bytes>,
    /// The rest, and its length.
    pub file: Option<(File, u64)>,
}

/// The destination and the attributes of the new file.
pub struct Target {
    /// Its path.
    pub path: PathBuf,
    /// The permissions of the file.
    pub access: u32,
    /// Permissions of missing parent directories, if they are to be created.
    pub parents: Option<u32>,
    /// Modification time, if known.
    pub modified: Option<SystemTime>,
    /// Number used in the name of a copy.
    pub number: u32,
}

/// The permissions that `user:rw group:r` and the like stand for, as in `dav_access` and `proxy_store_access`. The user
/// may read and write unless `user:` is given.
///
/// # Errors
/// A word that does not name a class and its permissions.
pub fn parse_permissions(statement: &Statement) -> Result<u32, Diagnostic> {
    let mut access = 0;
    let mut user = 0o600;
    for word in &statement.args {
        let invalid = || {
            let hint = "it must be user:, group: or all:, and then r or rw";
            Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span).hint(hint)
        };
        let colon = word.text.iter().position(|&byte| byte == b':').ok_or_else(invalid)?;
        let shift = match &word.text[..colon] {
            b"user" => {
                user = 0;
                6
            }
            b"group" => 3,
            b"all" => 0,
            _ => return Err(invalid()),
        };
        let rights = match &word.text[colon + 1..] {
            b"rw" => 0o6,
            b"r" => 0o4,
            _ => return Err(invalid()),
        };
        access |= rights << shift;
    }
    Ok(access | user)
}

/// The permissions of a directory for files with these permissions: a class that may read may also enter.
pub fn directory_permissions(access: u32) -> u32 {
    access | (access & 0o444) >> 2
}

/// Puts the content into its place. Returns true if its file was renamed, and false if it was copied, because it has no
/// name or is on another file system.
///
/// # Errors
/// Those of the file systems.
pub fn place(content: &Content, target: &Target) -> Result<bool, FileError> {
    let has_taken_name = match (&content.name, &content.file) {
        (Some(name), Some((file, _))) => rename_into_place(name, file, target)?,
        _ => false,
    };
    if !has_taken_name {
        let copy = || {
            copy_beside(&target.path, target.number, Access::Exactly(target.access), &|copy| {
                content.memory.iter().try_for_each(|bytes| copy.write_all(bytes))?;
                if let Some((file, length)) = &content.file {
                    append_file(copy, file, *length)?;
                }
                set_modified(copy, target.modified)
            })
        };
        with_parents(&target.path, target.parents, copy)?;
    }
    Ok(has_taken_name)
}

fn append_file(copy: &mut fs::File, file: &File, length: u64) -> io::Result<()> {
    let mut source = own(file)?;
    source.rewind()?;
    let copied = io::copy(&mut source.take(length), copy)?;
    if copied == length { Ok(()) } else { Err(ErrorKind::UnexpectedEof.into()) }
}

/// A duplicate of the descriptor of an open file.
fn own(file: &File) -> io::Result<fs::File> {
    file.as_fd().try_clone_to_owned().map(fs::File::from)
}

/// Sets the modification time of a file, if it is known.
///
/// # Errors
/// Those of futimens(2).
pub fn set_modified(file: &fs::File, modified: Option<SystemTime>) -> io::Result<()> {
    match modified {
        Some(modified) => file.set_times(FileTimes::new().set_accessed(modified).set_modified(modified)),
        None => Ok(()),
    }
}

/// Renames a file; false if the target is on another file system.
fn rename_into_place(name: &Path, file: &File, target: &Target) -> Result<bool, FileError> {
    let prepare = |file: fs::File| {
        file.set_permissions(Permissions::from_mode(target.access))?;
        set_modified(&file, target.modified)
    };
    own(file).and_then(prepare).map_err(|error| FileError::new("chmod", name, error))?;
    match with_parents(&target.path, target.parents, || rename(name, &target.path)) {
        Err(error) if error.error().kind() == ErrorKind::CrossesDevices => Ok(false),
        renamed => renamed.map(|()| true),
    }
}

/// rename(2)
///
/// # Errors
/// Those of rename(2).
pub fn rename(from: &Path, to: &Path) -> Result<(), FileError> {
    fs::rename(from, to).map_err(|error| FileError::new("rename", from, error).with_target(to))
}

/// Runs `work`. If directories were missing and `access` is given, creates them with these permissions and runs it
/// again.
///
/// # Errors
/// Those of `work`, and of mkdir(2).
pub fn with_parents(
    path: &Path,
    access: Option<u32>,
    mut work: impl FnMut() -> Result<(), FileError>,
) -> Result<(), FileError> {
    match (work(), access, path.parent()) {
        (Err(error), Some(access), Some(parent)) if error.error().kind() == ErrorKind::NotFound => {
            create_directories_blocking(parent, access)?;
            work()
        }
        (done, ..) => done,
    }
}

/// The permissions of a new file.
#[derive(Clone, Copy)]
pub enum Access {
    /// These.
    Exactly(u32),
    /// These minus the umask.
    Of(u32),
}

/// Creates a file beside `path` and renames it to `path` when it is complete.
///
/// # Errors
/// Those of the file system and of `fill`; the incomplete file is removed.
pub fn copy_beside(
    path: &Path,
    number: u32,
    access: Access,
    fill: &dyn Fn(&mut fs::File) -> io::Result<()>,
) -> Result<(), FileError> {
    let (mut copy, name) = create_beside(path, number, access)?;
    let filled = match access {
        Access::Exactly(mode) => copy.set_permissions(Permissions::from_mode(mode)),
        Access::Of(_) => Ok(()),
    };
    let filled = filled.and_then(|()| fill(&mut copy)).map_err(|error| FileError::new("write", name.as_path(), error));
    let done = filled.and_then(|()| rename(&name, path));
    if done.is_err() {
        // The incomplete file is of no use, and the first error is the one to report.
        let _ = fs::remove_file(&name);
    }
    done
}

fn create_beside(path: &Path, number: u32, access: Access) -> Result<(fs::File, PathBuf), FileError> {
    let (Access::Exactly(mode) | Access::Of(mode)) = access;
    let mut attempts = 0;
    loop {
        let mut name = OsString::from(path);
        name.push(format!(".{:010}", number.wrapping_add(attempts)));
        let name = PathBuf::from(name);
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&name) {
            Ok(file) => return Ok((file, name)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists && attempts < NAMES_MAX => attempts += 1,
            Err(error) => return Err(FileError::new("open", name, error)),
        }
    }
}

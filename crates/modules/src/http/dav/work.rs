//! Changes of files, in a thread of the pool. Every function here blocks.
//!
//! Changes and removals never follow a symbolic link: they replace or remove the link itself. A tree is walked without
//! recursion and with one directory open at a time, at any depth.

use std::fs::{self, DirBuilder, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_files::FileError;
use gale_http::files::placing::{self, Access, Content, Target, copy_beside, rename, set_modified, with_parents};

/// Maximum number of errors of one request that are logged individually.
const ERRORS_MAX: usize = 16;

/// Permission bits of a mode.
const PERMISSIONS: u32 = 0o777;

/// Reason why a request failed.
#[derive(Debug)]
pub struct Refusal {
    pub status: u16,
    pub level: Level,
    pub text: String,
}

/// Files of a tree that failed while others succeeded.
#[derive(Debug, Default)]
pub struct Skipped {
    pub errors: Vec<FileError>,
    /// Number of errors that are not listed.
    pub more: u64,
}

impl Skipped {
    fn note(&mut self, error: FileError) {
        if self.errors.len() < ERRORS_MAX {
            self.errors.push(error);
        } else {
            self.more += 1;
        }
    }
}

/// Returns the log level and nginx's status of an error; `missing` is the status of a missing path.
pub fn judge(error: &io::Error, missing: u16) -> (Level, u16) {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG) => (Level::Error, missing),
        Some(libc::EACCES | libc::EPERM) => (Level::Error, 403),
        Some(libc::EEXIST) => (Level::Error, 405),
        Some(libc::ENOSPC | libc::EDQUOT) => (Level::Crit, 507),
        _ => (Level::Crit, 500),
    }
}

impl Refusal {
    fn new(error: &FileError, missing: u16) -> Refusal {
        let (level, status) = judge(error.error(), missing);
        Refusal { status, level, text: error.to_string() }
    }

    fn said(status: u16, text: String) -> Refusal {
        Refusal { status, level: Level::Error, text }
    }
}

/// Status of a path whose parent does not exist (RFC 4918 §9.7.1).
const NO_PARENT: u16 = 409;

/// Result of an upload.
pub struct PutOutcome {
    /// `true` if the file did not exist before.
    pub is_new: bool,
    /// `true` if the upload was renamed to the target.
    pub has_taken_name: bool,
}

pub fn put(upload: &Content, target: &Target) -> Result<PutOutcome, Refusal> {
    let is_new = match fs::metadata(&target.path) {
        Ok(metadata) if metadata.is_dir() => {
            let error = OsErrorText(&io::Error::from_raw_os_error(libc::EISDIR)).to_string();
            let text = format!("\"{}\" could not be created {error}", target.path.display());
            return Err(Refusal::said(409, text));
        }
        Ok(_) => false,
        Err(_) => true,
    };
    let has_taken_name = placing::place(upload, target).map_err(|error| Refusal::new(&error, NO_PARENT))?;
    Ok(PutOutcome { is_new, has_taken_name })
}

/// Removes a file, or a directory with its contents.
pub fn delete(path: &Path, is_collection: bool, skipped: &mut Skipped) -> Result<(), Refusal> {
    let look = fs::symlink_metadata(path);
    let metadata = look.map_err(|error| {
        let missing = if error.kind() == ErrorKind::NotADirectory { 409 } else { 404 };
        Refusal::new(&FileError::new("lstat", path, error), missing)
    })?;
    match (metadata.is_dir(), is_collection) {
        (true, true) => delete_tree(path, skipped),
        (false, false) => remove_file(path),
        (true, false) => {
            let error = io::Error::from_raw_os_error(libc::EISDIR);
            return Err(Refusal::said(409, format!("DELETE \"{}\" failed {}", path.display(), OsErrorText(&error))));
        }
        (false, true) => {
            let error = io::Error::from_raw_os_error(libc::ENOTDIR);
            return Err(Refusal::new(&FileError::new("lstat", path, error), 409));
        }
    }
    .map_err(|error| Refusal::new(&error, 404))
}

fn remove_file(path: &Path) -> Result<(), FileError> {
    fs::remove_file(path).map_err(|error| FileError::new("unlink", path, error))
}

/// Removes as much of a tree as possible; the error is that of the directory itself.
fn delete_tree(path: &Path, skipped: &mut Skipped) -> Result<(), FileError> {
    walk(path, &mut |visit| {
        let done = match visit {
            Visit::Enter(_) => Ok(()),
            Visit::File(path) | Visit::Special(path) => remove_file(path),
            Visit::Leave(directory) if directory == path => return remove_directory(directory).map(|()| true),
            Visit::Leave(directory) => remove_directory(directory),
            Visit::Failed(error) => Err(error),
        };
        if let Err(error) = done {
            skipped.note(error);
        }
        Ok(true)
    })
}

fn remove_directory(path: &Path) -> Result<(), FileError> {
    fs::remove_dir(path).map_err(|error| FileError::new("rmdir", path, error))
}

/// Creates a directory.
pub fn make_collection(path: &Path, access: u32) -> Result<(), Refusal> {
    make_directory(path, access).map_err(|error| Refusal::new(&error, NO_PARENT))
}

fn make_directory(path: &Path, access: u32) -> Result<(), FileError> {
    DirBuilder::new().mode(access).create(path).map_err(|error| FileError::new("mkdir", path, error))
}

/// A copy or a move.
pub struct Transfer {
    /// Source, without a slash at its end, like `to`.
    pub from: PathBuf,
    pub to: PathBuf,
    pub is_move: bool,
    /// `true` if the client says that both are collections.
    pub is_collection: bool,
    /// `true` if the members of a collection are copied, too.
    pub has_members: bool,
    /// `true` if the destination may be overwritten.
    pub overwrites: bool,
    /// Permissions of missing parent directories that are created for a moved file.
    pub parents: u32,
    /// Number for the name of a temporary copy.
    pub number: u32,
    /// Message for a source that is a collection although the client takes it for a file, and for a destination that is
    /// a collection.
    pub is_collection_text: String,
    pub to_collection_text: String,
}

/// Copies or moves a file, or a directory with its contents.
pub fn transfer(transfer: &Transfer, skipped: &mut Skipped) -> Result<(), Refusal> {
    let Transfer { from, to, .. } = transfer;
    let replaced = look_at_target(transfer)?;
    let source = look_at_source(transfer)?;
    check_places(transfer)?;
    if !source.is_dir() {
        return transfer_file(transfer).map_err(|error| Refusal::new(&error, NO_PARENT));
    }
    let refused = |error: FileError| Refusal::new(&error, NO_PARENT);
    if let Some(replaced) = replaced {
        let removed = if replaced.is_dir() { delete_tree(to, skipped) } else { remove_file(to) };
        removed.map_err(|error| Refusal::new(&error, 404))?;
    }
    if transfer.is_move {
        match rename(from, to) {
            Err(error) if error.error().kind() == ErrorKind::CrossesDevices => {}
            renamed => return renamed.map_err(refused),
        }
    }
    make_directory(to, source.permissions().mode() & PERMISSIONS).map_err(refused)?;
    if transfer.has_members {
        copy_tree(from, to, transfer.number, skipped).map_err(refused)?;
    }
    // If the copy of a tree is incomplete, the source must not be removed.
    if let Some(error) = skipped.errors.first() {
        return Err(Refusal { text: "the collection is not complete".to_owned(), ..Refusal::new(error, 404) });
    }
    if transfer.is_move { delete_tree(from, skipped).map_err(refused) } else { Ok(()) }
}

fn look_at_target(transfer: &Transfer) -> Result<Option<Metadata>, Refusal> {
    let Transfer { to, .. } = transfer;
    let metadata = match fs::symlink_metadata(to) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Refusal::new(&FileError::new("lstat", to.as_path(), error), NO_PARENT)),
    };
    if metadata.is_dir() && !transfer.is_collection {
        return Err(Refusal::said(409, transfer.to_collection_text.clone()));
    }
    if !transfer.overwrites {
        let error = io::Error::from_raw_os_error(libc::EEXIST);
        let text = format!("\"{}\" could not be created {}", to.display(), OsErrorText(&error));
        return Err(Refusal::said(412, text));
    }
    Ok(Some(metadata))
}

fn look_at_source(transfer: &Transfer) -> Result<Metadata, Refusal> {
    let Transfer { from, is_move, is_collection, .. } = transfer;
    // A copy follows a symbolic link, as reading does; a move moves the link itself.
    let metadata = if *is_move { fs::symlink_metadata(from) } else { fs::metadata(from) };
    let metadata = match metadata {
        Ok(metadata) if !metadata.is_dir() && *is_collection => Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
        metadata => metadata,
    };
    let metadata = metadata.map_err(|error| Refusal::new(&FileError::new("lstat", from.as_path(), error), 404))?;
    if metadata.is_dir() && !is_collection {
        return Err(Refusal::said(400, transfer.is_collection_text.clone()));
    }
    Ok(metadata)
}

/// Checks source and destination in the file system, since links can make them overlap although their names do not.
fn check_places(transfer: &Transfer) -> Result<(), Refusal> {
    let Transfer { from, to, .. } = transfer;
    let real = |path: &Path| match (fs::canonicalize(path), path.parent(), path.file_name()) {
        (Err(_), Some(parent), Some(name)) => fs::canonicalize(parent).map(|parent| parent.join(name)).ok(),
        (real, ..) => real.ok(),
    };
    let (Some(real_from), Some(real_to)) = (real(from), real(to)) else { return Ok(()) };
    let is_nested = real_from.starts_with(&real_to) || real_to.starts_with(&real_from);
    if real_from == real_to || is_nested && transfer.is_collection {
        let (from, to) = (from.display(), to.display());
        return Err(Refusal::said(403, format!("one of \"{from}\" and \"{to}\" is inside the other")));
    }
    Ok(())
}

fn transfer_file(transfer: &Transfer) -> Result<(), FileError> {
    let Transfer { from, to, number, .. } = transfer;
    if !transfer.is_move {
        return copy_file(from, to, *number);
    }
    match with_parents(to, Some(transfer.parents), || rename(from, to)) {
        Err(error) if error.error().kind() == ErrorKind::CrossesDevices => {
            copy_file(from, to, *number)?;
            remove_file(from)
        }
        moved => moved,
    }
}

/// Copies a file with its permissions and its modification time.
fn copy_file(from: &Path, to: &Path, number: u32) -> Result<(), FileError> {
    // Opening a FIFO would wait for a writer.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(from).and_then(|source| {
        let metadata = source.metadata()?;
        if metadata.is_file() { Ok((source, metadata)) } else { Err(io::Error::from_raw_os_error(libc::EPERM)) }
    });
    let (source, metadata) = opened.map_err(|error| FileError::new("open", from, error))?;
    let access = Access::Of(metadata.permissions().mode() & PERMISSIONS);
    copy_beside(to, number, access, &|copy| {
        io::copy(&mut &source, copy)?;
        set_modified(copy, metadata.modified().ok())
    })
}

/// Copies the contents of a directory, except links and special files. The error is one that ends the copy.
fn copy_tree(from: &Path, to: &Path, number: u32, skipped: &mut Skipped) -> Result<(), FileError> {
    let place = |path: &Path| path.strip_prefix(from).map_or_else(|_| to.to_owned(), |rest| to.join(rest));
    walk(from, &mut |visit| {
        let done = match visit {
            Visit::Enter(path) if path == from => Ok(()),
            Visit::Enter(path) => copy_directory(path, &place(path)),
            Visit::File(path) => copy_file(path, &place(path), number),
            Visit::Special(_) => Ok(()),
            Visit::Leave(path) => copy_time(path, &place(path)),
            Visit::Failed(error) => Err(error),
        };
        match done {
            Err(error) if error.is_out_of_space() => Err(error),
            Err(error) => {
                skipped.note(error);
                Ok(false)
            }
            Ok(()) => Ok(true),
        }
    })
}

fn copy_directory(from: &Path, to: &Path) -> Result<(), FileError> {
    let metadata = fs::symlink_metadata(from).map_err(|error| FileError::new("lstat", from, error))?;
    make_directory(to, metadata.permissions().mode() & PERMISSIONS)
}

fn copy_time(from: &Path, to: &Path) -> Result<(), FileError> {
    let modified = fs::symlink_metadata(from).and_then(|metadata| metadata.modified());
    let set = modified.and_then(|modified| set_modified(&fs::File::open(to)?, Some(modified)));
    set.map_err(|error| FileError::new("utimes", to, error))
}

/// A step of a walk.
enum Visit<'p> {
    /// A directory, before its contents.
    Enter(&'p Path),
    File(&'p Path),
    /// A symbolic link, which is not followed, or a special file.
    Special(&'p Path),
    /// A directory, after its contents.
    Leave(&'p Path),
    /// A file or directory that could not be read.
    Failed(FileError),
}

/// Walks a tree. `visit` returns whether to enter a directory, or an error that ends the walk; an unreadable top ends
/// it, too.
fn walk(top: &Path, visit: &mut dyn FnMut(Visit<'_>) -> Result<bool, FileError>) -> Result<(), FileError> {
    enum Step {
        Enter(PathBuf),
        Leave(PathBuf),
    }
    let mut steps = vec![Step::Enter(top.to_owned())];
    while let Some(step) = steps.pop() {
        let directory = match step {
            Step::Enter(directory) => directory,
            Step::Leave(directory) => {
                visit(Visit::Leave(&directory))?;
                continue;
            }
        };
        if !visit(Visit::Enter(&directory))? {
            continue;
        }
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) => {
                let error = FileError::new("opendir", directory.as_path(), error);
                if directory == top {
                    return Err(error);
                }
                visit(Visit::Failed(error))?;
                // The directory may be empty all the same.
                visit(Visit::Leave(&directory))?;
                continue;
            }
        };
        steps.push(Step::Leave(directory.clone()));
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    visit(Visit::Failed(FileError::new("readdir", directory.as_path(), error)))?;
                    break;
                }
            };
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => steps.push(Step::Enter(path)),
                Ok(kind) if kind.is_file() => drop(visit(Visit::File(&path))?),
                Ok(_) => drop(visit(Visit::Special(&path))?),
                Err(error) => drop(visit(Visit::Failed(FileError::new("lstat", path, error)))?),
            }
        }
    }
    Ok(())
}

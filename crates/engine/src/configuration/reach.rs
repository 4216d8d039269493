//! Files and ports that the worker process needs because of its configuration, from which the bounds of the sandbox are
//! made.
//!
//! A directive with a path or an address registers it here, or a module does so for each scope. A path with variables
//! is registered as the directory that contains all its values.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use gale_config::Diagnostic;
use gale_process::{Places, Ports, Sandbox, SandboxMode};

/// Files and ports that the worker process needs.
#[derive(Debug, Default)]
pub struct Reach {
    writable: Bounded<Places>,
    /// Directories of caches and temporary files.
    kept: Vec<PathBuf>,
    readable: Bounded<Places>,
    ports: Bounded<Ports>,
}

/// Places or ports, and the directives that make them unbounded.
#[derive(Debug, Default)]
struct Bounded<T> {
    reached: T,
    unbounded: Vec<String>,
}

/// The part of a configured path that is known without a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KnownPath<'p> {
    /// The whole path.
    Whole(&'p [u8]),
    /// The text before the first variable.
    Beginning(&'p [u8]),
}

impl KnownPath<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            KnownPath::Whole(path) | KnownPath::Beginning(path) => path,
        }
    }
}

impl Reach {
    /// Registers a file, or a directory with its contents, for writing. `directive` is named in messages.
    pub fn writes(&mut self, path: KnownPath<'_>, directive: &str) {
        self.writable.add(path, directive);
    }

    /// As [`Reach::writes`], for a [`Path`].
    pub fn writes_below(&mut self, path: &Path) {
        self.writable.reached.add(path);
    }

    /// Registers a directory of a cache or of temporary files, which may be removed and created again.
    pub fn keeps_in(&mut self, path: &Path) {
        if !self.kept.iter().any(|known| known == path) {
            self.kept.push(path.to_owned());
        }
    }

    /// Registers a file, or a directory with its contents, for reading. `directive` is named in messages.
    pub fn reads(&mut self, path: KnownPath<'_>, directive: &str) {
        self.readable.add(path, directive);
    }

    /// As [`Reach::reads`]; a relative path is below this directory.
    pub fn reads_in(&mut self, directory: &Path, path: KnownPath<'_>, directive: &str) {
        let full = directory.join(OsStr::from_bytes(path.bytes()));
        let full = full.as_os_str().as_bytes();
        match path {
            KnownPath::Whole(_) => self.reads(KnownPath::Whole(full), directive),
            // The variable may contain an absolute path.
            KnownPath::Beginning(b"") => self.reads(path, directive),
            KnownPath::Beginning(_) => self.reads(KnownPath::Beginning(full), directive),
        }
    }

    /// As [`Reach::reads_in`], for a certificate or a key, which may also be data (`data:$x`).
    pub fn reads_certificate(&mut self, directory: &Path, path: KnownPath<'_>, directive: &str) {
        if !path.bytes().starts_with(b"data:") {
            self.reads_in(directory, path, directive);
        }
    }

    /// Registers the TCP port of a server.
    pub fn connects(&mut self, port: u16) {
        self.ports.reached.add(port);
    }

    /// Registers that servers of `directive` may have any TCP port.
    pub fn connects_to_any_port(&mut self, directive: &str) {
        self.ports.reached = Ports::Any;
        self.ports.note(directive);
    }

    /// Passes everything to the worker process's sandbox. Returns errors and notices about unbounded directives.
    pub(super) fn complete(mut self, sandbox: &mut Sandbox) -> Vec<Diagnostic> {
        let is_strict = sandbox.mode == SandboxMode::On;
        for path in std::mem::take(&mut self.kept) {
            // A directory that is created again needs access to its parent.
            let around = path.parent().filter(|around| !is_strict && around.parent().is_some());
            self.writes_below(around.unwrap_or(&path));
        }
        let paths = |what: &str, directives: &str| {
            let message = format!("{what} is not restricted: the path begins with a variable in {directives}");
            match is_strict {
                true => Diagnostic::emerg(format!("\"sandbox on\": {message}"))
                    .hint("a path that begins with a directory has bounds; \"sandbox auto\" goes without"),
                false => Diagnostic::notice(message),
            }
        };
        let ports = |directives: &str| {
            Diagnostic::notice(format!("connecting is not restricted: any TCP port may be meant by {directives}"))
        };
        let mut said = Vec::new();
        if sandbox.is_on() {
            said.extend(self.writable.directives().map(|directives| paths("writing", &directives)));
        }
        if is_strict {
            said.extend(self.readable.directives().map(|directives| paths("reading", &directives)));
            said.extend(self.ports.directives().map(|directives| ports(&directives)));
        }
        sandbox.writable = self.writable.reached;
        sandbox.readable = if is_strict { self.readable.reached } else { Places::Anywhere };
        sandbox.ports = if is_strict { self.ports.reached } else { Ports::Any };
        said
    }
}

impl<T> Bounded<T> {
    fn note(&mut self, directive: &str) {
        if !self.unbounded.iter().any(|known| known == directive) {
            self.unbounded.push(directive.to_owned());
        }
    }

    /// The unbounded directives, quoted.
    fn directives(&self) -> Option<String> {
        let quoted: Vec<String> = self.unbounded.iter().map(|directive| format!("\"{directive}\"")).collect();
        (!quoted.is_empty()).then(|| quoted.join(", "))
    }
}

impl Bounded<Places> {
    fn add(&mut self, path: KnownPath<'_>, directive: &str) {
        let is_bounded = match path {
            KnownPath::Whole(path) => {
                self.reached.add(Path::new(OsStr::from_bytes(path)));
                true
            }
            KnownPath::Beginning(beginning) => self.reached.add_beginning(beginning),
        };
        if !is_bounded {
            self.note(directive);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(mode: SandboxMode, note: impl FnOnce(&mut Reach)) -> (Sandbox, Vec<String>) {
        let mut reach = Reach::default();
        note(&mut reach);
        let mut sandbox = Sandbox { mode, ..Sandbox::default() };
        let said = reach.complete(&mut sandbox);
        (sandbox, said.into_iter().map(|diagnostic| diagnostic.message).collect())
    }

    #[test]
    fn auto_bounds_writing_alone() {
        let (sandbox, said) = completed(SandboxMode::Auto, |reach| {
            reach.reads(KnownPath::Beginning(b""), "root");
            reach.connects(80);
            reach.writes(KnownPath::Beginning(b"/srv/x-"), "access_log");
        });
        assert_eq!((sandbox.readable, sandbox.ports), (Places::Anywhere, Ports::Any));
        assert_ne!(sandbox.writable, Places::Anywhere);
        assert!(said.is_empty(), "{said:?}");
    }

    #[test]
    fn directories_that_are_made_anew_are_known_by_the_one_around() {
        let places_of = |mode, path: &str| completed(mode, |reach| reach.keeps_in(Path::new(path))).0.writable;
        let places = |path: &str| {
            let mut places = Places::default();
            places.add(Path::new(path));
            places
        };
        assert_eq!(places_of(SandboxMode::Auto, "/var/cache/gale"), places("/var/cache"));
        assert_eq!(places_of(SandboxMode::Auto, "/cache"), places("/cache"), "not the root");
        assert_eq!(places_of(SandboxMode::On, "/var/cache/gale"), places("/var/cache/gale"));
    }

    #[test]
    fn paths_without_bounds_are_named_once() {
        let note = |reach: &mut Reach| {
            for _ in 0..2 {
                reach.writes(KnownPath::Beginning(b"/"), "dav_methods");
                reach.reads(KnownPath::Beginning(b""), "root");
                reach.connects_to_any_port("proxy_pass");
            }
        };
        let writing = "writing is not restricted: the path begins with a variable in \"dav_methods\"";
        assert_eq!(completed(SandboxMode::Auto, note).1, [writing]);
        let expected = [
            format!("\"sandbox on\": {writing}"),
            "\"sandbox on\": reading is not restricted: the path begins with a variable in \"root\"".to_owned(),
            "connecting is not restricted: any TCP port may be meant by \"proxy_pass\"".to_owned(),
        ];
        assert_eq!(completed(SandboxMode::On, note).1, expected);
        assert!(completed(SandboxMode::Off, note).1.is_empty());
    }

    #[test]
    fn ports_are_those_that_were_noted() {
        let (sandbox, _) =
            completed(SandboxMode::On, |reach| [443, 80, 443].into_iter().for_each(|port| reach.connects(port)));
        assert_eq!(sandbox.ports, Ports::Only([80, 443].into()));
    }
}

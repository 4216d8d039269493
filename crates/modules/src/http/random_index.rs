//! random_index: a random file of a directory as its index.
//!   random_index on|off;          location
//! (<https://nginx.org/en/docs/http/ngx_http_random_index_module.html>)
//!
//! A thread of the pool reads the directory and keeps one name only, however many there are.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_config::{Body as BlockBody, Contexts, One, Setting, Takes, slot, values};
use gale_engine::module::{ConfType, Directive, Module};
use gale_files::likely_device;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files::find_path;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_runtime::default_pool;

use super::index::only_directories;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_random_index",
    directives: &[Directive {
        name: "random_index",
        contexts: Contexts::LOCATION,
        takes: Takes::Flag,
        body: BlockBody::None,
        default: "off",
        about: "Enables or disables answering requests for a directory with a random file in it.",
        store: &One { parse: values::flag, slot: slot!(Conf, is_on) },
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(
            Phase::Content,
            &Wait {
                applies: |conf: &Conf| *conf.is_on.get(),
                first: only_directories,
                then: |request, _| choose(request),
            },
        )],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    is_on: Setting<bool>,
}

fn choose(request: &mut Request) -> LocalBoxFuture<'_, Flow> {
    Box::pin(async move {
        let mut path = Vec::with_capacity(128);
        if let Err(status) = find_path(request, &mut path) {
            return Flow::Respond(status);
        }
        path.pop();
        let path = PathBuf::from(OsString::from_vec(path));
        let name = path.display().to_string();
        let seed = gale_runtime::random_u64();
        let chosen = default_pool().run_for(likely_device(&path), move || one_of(&path, seed));
        match chosen.await.unwrap_or_else(|refused| Err(refused.into())) {
            Ok(Some(file)) => Flow::Redirect { uri: [&request.uri[..], file.as_bytes()].concat(), args: None },
            Ok(None) => Flow::Next,
            Err(error) => {
                let (level, status) = match error.raw_os_error() {
                    Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG) => (Level::Error, 404),
                    Some(libc::EACCES) => (Level::Error, 403),
                    _ => (Level::Crit, 500),
                };
                request.log(level, format_args!("opendir() \"{name}\" failed {}", OsErrorText(&error)));
                Flow::Respond(status)
            }
        }
    })
}

/// Returns a random regular file of the directory; blocks. All files are equally likely. (Reservoir sampling: the n-th
/// file replaces the one chosen so far with a probability of 1/n.)
fn one_of(path: &Path, mut seed: u64) -> io::Result<Option<OsString>> {
    let mut chosen = None;
    let mut count = 0_u64;
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.as_bytes().starts_with(b".") {
            continue;
        }
        let kind = entry.file_type()?;
        // A dangling link is not a file.
        let is_file =
            kind.is_file() || kind.is_symlink() && std::fs::metadata(entry.path()).is_ok_and(|to| to.is_file());
        if !is_file {
            continue;
        }
        count += 1;
        // A step of xorshift64.
        seed = seed.max(1);
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        if seed.is_multiple_of(count) {
            chosen = Some(name);
        }
    }
    Ok(chosen)
}

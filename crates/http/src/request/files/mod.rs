//! Maps a request to a file by `root` and `alias`, and finds the location's settings for opening and sending files.
//!
//! Works on text only: nothing here accesses the disk, and paths are not checked for existence.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#alias>)

pub mod open_files;
pub mod thread_pool;

use std::rc::Rc;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_files::LinkCheck;
use gale_runtime::{ThreadPool, default_pool};

use crate::files::delivery::{FileOptions, ReadWay};
use crate::request::Request;
use crate::request::configuration::settings::{Aio, Alias, CoreSettings, Root};
use crate::request::response::ShortText;
use crate::request::variables::template::{leads_upwards, refuse_path};

/// Appends the path of the file for the request's URI: `root` followed by the URI, or the result of `alias`.
///
/// # Errors
/// The status to answer, with nothing appended. If a rewrite moved the URI out of the location whose prefix `alias`
/// replaces, that is 500, as in nginx. A path that leads out of the directory is 404: a URI has no `..` segment, but
/// the rest that `alias` or a rewrite leaves may have one (`/files../x` in `location /files`), and so may a variable in
/// `root` or `alias`.
pub fn find_path(request: &Request, out: &mut Vec<u8>) -> Result<(), u16> {
    let root = request.scope().core.root.get();
    let is_below_alias = request.routing.adds_uri_to_alias && root.alias == Some(Alias::Whole);
    let tail = match &root.alias {
        Some(_) if !request.is_in_its_location() => None,
        _ if is_below_alias => Some(&request.uri[..]),
        _ => tail(root, &request.uri),
    };
    let Some(tail) = tail else {
        let name = BStr::new(&request.scope().name);
        let message = format_args!("\"alias\" cannot be used in location \"{name}\" where URI was rewritten");
        request.log(Level::Alert, message);
        return Err(500);
    };
    if append_path(request, tail, out) { Ok(()) } else { Err(404) }
}

/// True if a segment is `..`, whatever its origin: no file below a directory has such a path.
pub fn may_lead_out(tail: &[u8]) -> bool {
    leads_upwards(tail, |_| true)
}

/// Appends the directory of `root` or `alias` and the path below it. Returns false, with nothing appended, if that
/// leads out of the directory: by a `..` segment in `tail`, or if a dot at the end of the directory and one at the
/// beginning of `tail` join to `..`.
#[must_use]
pub fn append_path(request: &Request, tail: &[u8], out: &mut Vec<u8>) -> bool {
    if may_lead_out(tail) {
        refuse_path(request, tail);
        return false;
    }
    let start = out.len();
    if !directory_of(request, out) {
        return false;
    }
    let joint = out.len();
    out.extend_from_slice(tail);
    if tail.first() == Some(&b'.') && out[..joint].ends_with(b".") && leads_upwards(out, |place| place + 1 == joint) {
        refuse_path(request, out);
        out.truncate(start);
        return false;
    }
    true
}

/// Appends the directory of `root` or `alias`: `$document_root`. Returns false, with nothing appended, if variables in
/// it lead out of the configured directory.
pub fn directory_of(request: &Request, out: &mut Vec<u8>) -> bool {
    let root = request.scope().core.root.get();
    let start = out.len();
    if !root.path.append_path(request, out) {
        return false;
    }
    if let Some(base) = &root.base
        && out.get(start) != Some(&b'/')
    {
        let relative = out.split_off(start);
        out.extend_from_slice(base);
        out.push(b'/');
        out.extend_from_slice(&relative);
    }
    true
}

/// The check that `disable_symlinks` demands on the way to a file, if any.
/// (<https://nginx.org/en/docs/http/ngx_http_core_module.html#disable_symlinks>)
pub fn link_check(request: &Request, path: &[u8]) -> Option<LinkCheck> {
    let setting = request.scope().core.disable_symlinks.get();
    let refused = setting.refused?;
    let from = setting.from.as_ref().map(|from| from.evaluate(request)).unwrap_or_default();
    match path.strip_prefix(&*from) {
        Some([]) => None,
        Some([b'/', ..]) => Some(LinkCheck { refused, from: from.len() }),
        Some(_) if from.ends_with(b"/") => Some(LinkCheck { refused, from: from.len() - 1 }),
        _ => Some(LinkCheck { refused, from: 0 }),
    }
}

/// The thread pool for the files of the request's location: `aio threads=…`.
pub fn pool_of(request: &Request) -> ThreadPool {
    FileOptions::of(request, &request.scope().core).and_then(|options| options.pool).unwrap_or_else(default_pool)
}

impl FileOptions {
    /// The options of a request's location. Returns `None` and logs an error if `aio threads` names a pool that does
    /// not exist.
    pub fn of(request: &Request, core: &CoreSettings) -> Option<FileOptions> {
        let (way, pool) = match core.aio.get() {
            Aio::Auto | Aio::Threads(None) => (ReadWay::Pool, None),
            Aio::Threads(Some(name)) => (ReadWay::Pool, Some(name.find(request)?)),
            Aio::On => (ReadWay::Ring, None),
            Aio::Off => (ReadWay::Blocking, None),
        };
        Some(FileOptions { way, pool, ..FileOptions::without_pool(core) })
    }

    /// The options for a response without a file.
    pub fn without_pool(core: &CoreSettings) -> FileOptions {
        let buffers = core.output_buffers.get();
        FileOptions {
            sendfile: *core.sendfile.get(),
            chunk_max: *core.sendfile_max_chunk.get(),
            nopush: *core.tcp_nopush.get(),
            way: ReadWay::Pool,
            pool: None,
            direct_from: *core.directio.get(),
            direct_alignment: *core.directio_alignment.get(),
            buffer_bytes: (buffers.count as u64).saturating_mul(buffers.size as u64),
            is_sequential: *core.read_ahead.get() > 0,
            postponed_bytes: *core.postpone_output.get(),
        }
    }
}

/// Sets the response's media type from the extension of the URI.
/// (<https://nginx.org/en/docs/http/ngx_http_core_module.html#types>)
pub fn set_content_type(request: &mut Request) {
    let configuration = Rc::clone(request.configuration());
    let core = &configuration.http().scope(request.scope).core;
    let known = extension(&request.uri).and_then(|extension| core.types.get().find(extension));
    let media_type = known.unwrap_or(core.default_type.get());
    request.response.content_type = ShortText::from_slice(media_type);
}

/// The part behind the last dot of the last segment.
fn extension(uri: &[u8]) -> Option<&[u8]> {
    // Extensions are short: a plain loop ends before a vectorised search has begun.
    let mark = uri.iter().rposition(|&byte| byte == b'.' || byte == b'/')?;
    (uri[mark] == b'.').then(|| &uri[mark + 1..])
}

/// The part of the URI behind the directory; `None` if it does not begin with the prefix that `alias` replaces.
fn tail<'u>(root: &Root, uri: &'u [u8]) -> Option<&'u [u8]> {
    match &root.alias {
        None => Some(uri),
        Some(Alias::Prefix(prefix)) => uri.strip_prefix(&**prefix),
        Some(Alias::Whole) => Some(b""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_belongs_to_the_last_segment() {
        assert_eq!(extension(b"/a.b/c.tar.gz"), Some(&b"gz"[..]));
        assert_eq!(extension(b"/a.b/c"), None);
        assert_eq!(extension(b"/a."), Some(&b""[..]));
    }
}

//! autoindex: directory listings.
//!   autoindex on|off;                          http, server, location
//!   autoindex_exact_size on|off;               http, server, location
//!   autoindex_format html|json|jsonp|xml;      http, server, location
//!   autoindex_localtime on|off;                http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_autoindex_module.html>)
//!
//! The texts are nginx's to the byte. A thread of the pool reads the directory and every file's metadata and writes the
//! text; the loop only sends it. A listing has at most `ENTRIES_MAX` entries, and all listings in memory together have
//! a bound (`LISTS`).

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bstr::BStr;
use gale_base::http_date;
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_config::{Body as BlockBody, Contexts, Diagnostic, One, Setting, Statement, Takes, slot, values};
use gale_engine::budget::Budget;
use gale_engine::module::{ConfType, Directive, Module};
use gale_files::likely_device;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::files::find_path;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_log::local_time;
use gale_protocol::request::Method;
use gale_protocol::uri::escape::{Class, escape, escape_html, escape_json};
use gale_runtime::{Bytes, PoolError, default_pool};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_autoindex",
    directives: &[
        Directive {
            name: "autoindex",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "off",
            about: "Enables or disables directory listings.",
            store: &One { parse: values::flag, slot: slot!(Conf, is_on) },
        },
        Directive {
            name: "autoindex_exact_size",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "on",
            about: "Enables or disables exact file sizes in HTML listings, instead of sizes rounded to K, M and G.",
            store: &One { parse: values::flag, slot: slot!(Conf, exact_size) },
        },
        Directive {
            name: "autoindex_format",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: BlockBody::None,
            default: "html",
            about: "Sets the format of directory listings: html, xml, json or jsonp.",
            store: &One { parse: format, slot: slot!(Conf, format) },
        },
        Directive {
            name: "autoindex_localtime",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "off",
            about: "Enables or disables local times in HTML listings, instead of UTC.",
            store: &One { parse: values::flag, slot: slot!(Conf, local_time) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(
            Phase::Content,
            &Wait {
                applies: |conf: &Conf| *conf.is_on.get(),
                first: only_directories,
                then: |request, conf| list(request, conf),
            },
        )],
        ..HttpPart::EMPTY
    }],
};

/// Maximum number of entries in a listing: some 50 MB of text.
const ENTRIES_MAX: usize = 200_000;

/// Memory of the listings for all clients together: a few of the longest, or thousands of usual ones. Slow clients must
/// not fill the memory with listings.
static LISTS: Budget = Budget::new(256 << 20);

/// Maximum length of a `jsonp` function's name, as in nginx.
const CALLBACK_BYTES_MAX: usize = 128;

/// Maximum width of a name in HTML.
const NAME_WIDTH: usize = 50;

#[derive(Default)]
struct Conf {
    is_on: Setting<bool>,
    exact_size: Setting<bool>,
    format: Setting<Format>,
    local_time: Setting<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    Html,
    Json,
    Jsonp,
    Xml,
}

fn format(statement: &Statement) -> Result<Format, Diagnostic> {
    let choices = [("html", Format::Html), ("json", Format::Json), ("jsonp", Format::Jsonp), ("xml", Format::Xml)];
    values::enumeration(statement, &choices)
}

/// Format of a listing, with all that the thread needs to know.
enum Form {
    Html(Html),
    /// JSON, as the argument of this function if there is one.
    Json(Option<Vec<u8>>),
    Xml,
}

struct Html {
    uri: Vec<u8>,
    exact_size: bool,
    /// Seconds to add to each time.
    offset: i64,
    /// `true` if the width of names is counted in characters.
    is_utf8: bool,
}

const TEXT_HTML: &[u8] = b"text/html";

impl Form {
    fn media_type(&self) -> &'static [u8] {
        match self {
            Form::Html(_) => TEXT_HTML,
            Form::Json(None) => b"application/json",
            Form::Json(Some(_)) => b"application/javascript",
            Form::Xml => b"text/xml; charset=utf-8",
        }
    }

    fn write(&self, entries: &[Entry]) -> Vec<u8> {
        match self {
            Form::Html(html) => html.write(entries),
            Form::Json(callback) => write_json(entries, callback.as_deref()),
            Form::Xml => write_xml(entries),
        }
    }
}

fn only_directories(request: &mut Request, _: &Conf) -> Option<Flow> {
    let asks_for_directory = request.uri.ends_with(b"/");
    let fits = matches!(request.method(), Method::Get | Method::Head);
    if asks_for_directory && fits { None } else { Some(Flow::Next) }
}

fn list<'a>(request: &'a mut Request, conf: &'a Conf) -> LocalBoxFuture<'a, Flow> {
    Box::pin(async move {
        let mut path = Vec::with_capacity(128);
        if let Err(status) = find_path(request, &mut path) {
            return Flow::Respond(status);
        }
        if path.len() > 1 {
            path.pop();
        }
        let form = match form(request, conf) {
            Ok(form) => form,
            Err(what) => {
                let callback = BStr::new(callback(request));
                request.log(Level::Info, format_args!("client sent {what} callback name: \"{callback}\""));
                return Flow::Respond(400);
            }
        };
        let media_type = form.media_type();
        if LISTS.is_full() {
            return Flow::Respond(no_room(request));
        }
        let path = PathBuf::from(OsString::from_vec(path));
        let own = path.clone();
        let listed = default_pool().run_for(likely_device(&path), move || {
            let directory = read_directory(&own)?;
            Ok((in_room(form.write(&directory.entries)), directory.skipped, directory.is_cut))
        });
        let refused = |refused: PoolError| Err(Failure { call: "readdir", path, error: refused.into() });
        let (text, skipped, is_cut) = match listed.await.unwrap_or_else(refused) {
            Ok(list) => list,
            Err(failure) => return Flow::Respond(refusal(request, &failure)),
        };
        if let Some(skipped) = skipped {
            refusal(request, &skipped);
        }
        if is_cut {
            request.log(Level::Warn, format_args!("the directory listing is cut after {ENTRIES_MAX} entries"));
        }
        let Some(text) = text else { return Flow::Respond(no_room(request)) };
        request.response.status = 200;
        request.response.content_type = media_type.into();
        Flow::Answer(Body::Bytes(text))
    })
}

/// Returns the text as a body, if the memory bound allows it.
fn in_room(text: Vec<u8>) -> Option<Bytes> {
    Some(LISTS.take(text.len())?.hold(text))
}

/// Returns the status for exceeding the memory bound, which nginx does not have: that of exhausted memory.
fn no_room(request: &Request) -> u16 {
    request.log(Level::Error, format_args!("directory listings that are being sent take too much memory"));
    503
}

/// Returns the format of the response. The error describes an invalid function name.
fn form(request: &mut Request, conf: &Conf) -> Result<Form, &'static str> {
    Ok(match conf.format.get() {
        Format::Html => {
            let offset = if *conf.local_time.get() {
                i64::from(local_time(gale_runtime::wall_seconds()).offset_minutes()) * 60
            } else {
                0
            };
            let is_utf8 = super::charset::is_utf8(request, TEXT_HTML);
            Form::Html(Html { uri: request.uri.clone(), exact_size: *conf.exact_size.get(), offset, is_utf8 })
        }
        Format::Json => Form::Json(None),
        Format::Jsonp => Form::Json(check_callback(callback(request))?),
        Format::Xml => Form::Xml,
    })
}

fn callback(request: &Request) -> &[u8] {
    super::variables::argument(&request.args, b"callback").unwrap_or_default()
}

/// Parses a function name: letters, digits, `_` and `.`. Without one the result is plain JSON.
fn check_callback(name: &[u8]) -> Result<Option<Vec<u8>>, &'static str> {
    if name.len() > CALLBACK_BYTES_MAX {
        return Err("too long");
    }
    if !name.iter().all(|&byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.')) {
        return Err("invalid");
    }
    Ok(Some(name.to_vec()).filter(|name| !name.is_empty()))
}

/// Logs a failure and returns its status.
fn refusal(request: &Request, failure: &Failure) -> u16 {
    let (level, status) = match failure.error.raw_os_error() {
        _ if failure.call != OPENDIR => (Level::Crit, 500),
        Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG) => (Level::Error, 404),
        Some(libc::EACCES) => (Level::Error, 403),
        _ => (Level::Crit, 500),
    };
    let Failure { call, path, error } = failure;
    request.log(level, format_args!("{call}() \"{}\" failed {}", path.display(), OsErrorText(error)));
    status
}

const OPENDIR: &str = "opendir";

/// A failed system call, described in nginx's words.
struct Failure {
    call: &'static str,
    path: PathBuf,
    error: io::Error,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Directory,
    File,
    Other,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Directory => "directory",
            Kind::File => "file",
            Kind::Other => "other",
        }
    }
}

struct Entry {
    name: Box<[u8]>,
    kind: Kind,
    /// Seconds since 1970.
    modified: i64,
    size: u64,
}

struct Directory {
    entries: Vec<Entry>,
    /// The first of the files whose metadata could not be read for lack of permission; all of these are left out.
    skipped: Option<Failure>,
    is_cut: bool,
}

/// Reads a directory. Blocks, so it must run in a thread of a pool. Directories come first, each kind sorted by name.
fn read_directory(path: &Path) -> Result<Directory, Failure> {
    let failed = |call, path: &Path| {
        let path = path.to_owned();
        move |error| Failure { call, path, error }
    };
    let mut directory = Directory { entries: Vec::new(), skipped: None, is_cut: false };
    for entry in std::fs::read_dir(path).map_err(failed(OPENDIR, path))? {
        let name = entry.map_err(failed("readdir", path))?.file_name();
        if name.as_bytes().starts_with(b".") {
            continue;
        }
        if directory.entries.len() == ENTRIES_MAX {
            directory.is_cut = true;
            break;
        }
        match look_at(&path.join(&name)) {
            Ok(metadata) => directory.entries.push(describe(&name, &metadata)),
            Err(failure) if failure.error.raw_os_error() == Some(libc::EACCES) => {
                directory.skipped.get_or_insert(failure);
            }
            Err(failure) => return Err(failure),
        }
    }
    directory.entries.sort_unstable_by(|one, other| {
        let is_later = |entry: &Entry| entry.kind != Kind::Directory;
        (is_later(one), &one.name).cmp(&(is_later(other), &other.name))
    });
    Ok(directory)
}

/// Returns the metadata of a link's target, or of the link itself if it is dangling.
fn look_at(path: &Path) -> Result<std::fs::Metadata, Failure> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(metadata),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ELOOP)) => {
            std::fs::symlink_metadata(path).map_err(|error| Failure { call: "lstat", path: path.to_owned(), error })
        }
        Err(error) => Err(Failure { call: "stat", path: path.to_owned(), error }),
    }
}

fn describe(name: &OsStr, metadata: &std::fs::Metadata) -> Entry {
    let kind = match metadata.file_type() {
        kind if kind.is_dir() => Kind::Directory,
        kind if kind.is_file() => Kind::File,
        _ => Kind::Other,
    };
    Entry { name: name.as_bytes().into(), kind, modified: metadata.mtime(), size: metadata.len() }
}

impl Html {
    fn write(&self, entries: &[Entry]) -> Vec<u8> {
        let mut out = Vec::with_capacity(256 + entries.len() * 128);
        out.extend_from_slice(b"<html>\r\n<head><title>Index of ");
        escape_html(&self.uri, &mut out);
        out.extend_from_slice(b"</title></head>\r\n<body>\r\n<h1>Index of ");
        escape_html(&self.uri, &mut out);
        out.extend_from_slice(b"</h1><hr><pre><a href=\"../\">../</a>\r\n");
        for entry in entries {
            self.write_entry(entry, &mut out);
        }
        out.extend_from_slice(b"</pre><hr></body>\r\n</html>\r\n");
        out
    }

    fn write_entry(&self, entry: &Entry, out: &mut Vec<u8>) {
        let name = &*entry.name;
        out.extend_from_slice(b"<a href=\"");
        escape(Class::Component, name, out);
        out.extend_from_slice(if entry.kind == Kind::Directory { b"/\">" } else { b"\">" });
        // Start of each character; in a name that is not UTF-8 each byte is a character.
        let characters = std::str::from_utf8(name).ok().filter(|_| self.is_utf8);
        let mut width = characters.map_or(name.len(), |text| text.chars().count());
        if width > NAME_WIDTH {
            let end = characters.and_then(|text| text.char_indices().nth(NAME_WIDTH - 3));
            escape_html(&name[..end.map_or(NAME_WIDTH - 3, |(end, _)| end)], out);
            out.extend_from_slice(b"..&gt;</a>");
        } else {
            escape_html(name, out);
            if entry.kind == Kind::Directory && width < NAME_WIDTH {
                out.push(b'/');
                width += 1;
            }
            out.extend_from_slice(b"</a>");
            out.resize(out.len() + NAME_WIDTH - width, b' ');
        }
        let mut text = String::with_capacity(48);
        // Writing to a string never fails.
        let _ = write_time(&mut text, entry.modified.saturating_add(self.offset));
        let _ = self.write_size(&mut text, entry);
        out.extend_from_slice(text.as_bytes());
        out.extend_from_slice(b"\r\n");
    }

    fn write_size(&self, out: &mut String, entry: &Entry) -> std::fmt::Result {
        let size = entry.size;
        match (entry.kind, self.exact_size) {
            (Kind::Directory, true) => write!(out, "{:>19}", "-"),
            (Kind::Directory, false) => write!(out, "{:>7}", "-"),
            (_, true) => write!(out, "{size:>19}"),
            (_, false) => {
                // Halves are rounded up.
                let rounded = |unit: u64| size / unit + u64::from(size % unit >= unit / 2);
                match size {
                    0..=9999 => write!(out, " {size:>6}"),
                    10_000..MEBIBYTE => write!(out, "{:>6}K", rounded(KIBIBYTE)),
                    MEBIBYTE..GIBIBYTE => write!(out, "{:>6}M", rounded(MEBIBYTE)),
                    GIBIBYTE.. => write!(out, "{:>6}G", rounded(GIBIBYTE)),
                }
            }
        }
    }
}

const KIBIBYTE: u64 = 1 << 10;
const MEBIBYTE: u64 = 1 << 20;
const GIBIBYTE: u64 = 1 << 30;

/// Writes a time as ` 28-Sep-1970 12:00 `.
fn write_time(out: &mut String, seconds: i64) -> std::fmt::Result {
    let (days, second_of_day) = split(seconds);
    let date = http_date::date_of(days);
    let month = BStr::new(http_date::MONTHS[date.month as usize - 1]);
    let (hour, minute) = (second_of_day / 3600, second_of_day / 60 % 60);
    write!(out, " {:02}-{month}-{} {hour:02}:{minute:02} ", date.day, date.year)
}

/// Returns the days since 1970 and the second of the day. Times before 1970 count as its beginning.
fn split(seconds: i64) -> (u64, u64) {
    let seconds = u64::try_from(seconds).unwrap_or(0).min(http_date::SECONDS_MAX);
    (seconds / 86_400, seconds % 86_400)
}

fn write_json(entries: &[Entry], callback: Option<&[u8]>) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + entries.len() * 128);
    if let Some(callback) = callback {
        out.extend_from_slice(b"/* callback */\r\n");
        out.extend_from_slice(callback);
        out.push(b'(');
    }
    out.push(b'[');
    for (number, entry) in entries.iter().enumerate() {
        if number > 0 {
            out.push(b',');
        }
        out.extend_from_slice(b"\r\n{ \"name\":\"");
        escape_json(&entry.name, &mut out);
        out.extend_from_slice(b"\", \"type\":\"");
        out.extend_from_slice(entry.kind.name().as_bytes());
        out.extend_from_slice(b"\", \"mtime\":\"");
        out.extend_from_slice(&http_date::format(u64::try_from(entry.modified).unwrap_or(0)));
        out.push(b'"');
        if entry.kind == Kind::File {
            out.extend_from_slice(format!(", \"size\":{}", entry.size).as_bytes());
        }
        out.extend_from_slice(b" }");
    }
    out.extend_from_slice(b"\r\n]");
    if callback.is_some() {
        out.extend_from_slice(b");");
    }
    out
}

fn write_xml(entries: &[Entry]) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + entries.len() * 128);
    out.extend_from_slice(b"<?xml version=\"1.0\"?>\r\n<list>\r\n");
    for entry in entries {
        let kind = entry.kind.name();
        let (days, second_of_day) = split(entry.modified);
        let http_date::Date { year, month, day } = http_date::date_of(days);
        let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
        let time = format!("{year:4}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z");
        out.extend_from_slice(format!("<{kind} mtime=\"{time}\"").as_bytes());
        if entry.kind == Kind::File {
            out.extend_from_slice(format!(" size=\"{}\"", entry.size).as_bytes());
        }
        out.push(b'>');
        escape_html(&entry.name, &mut out);
        out.extend_from_slice(format!("</{kind}>\r\n").as_bytes());
    }
    out.extend_from_slice(b"</list>\r\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &[u8], kind: Kind, size: u64) -> Entry {
        Entry { name: name.into(), kind, modified: 1_000_000_000, size }
    }

    fn html(exact_size: bool, entry: &Entry) -> String {
        let mut out = Vec::new();
        Html { uri: Vec::new(), exact_size, offset: 0, is_utf8: true }.write_entry(entry, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn sizes_are_rounded_as_nginx_rounds_them() {
        let size = |size| {
            let line = html(false, &entry(b"x", Kind::File, size));
            line.trim_end().rsplit(' ').next().unwrap().to_owned()
        };
        assert_eq!([size(0), size(9999), size(10_000)], ["0", "9999", "10K"]);
        assert_eq!([size(10 * 1024 + 511), size(10 * 1024 + 512)], ["10K", "11K"]);
        assert_eq!([size(MEBIBYTE - 1), size(MEBIBYTE), size(MEBIBYTE * 3 / 2)], ["1024K", "1M", "2M"]);
        assert_eq!([size(GIBIBYTE - 1), size(GIBIBYTE * 5 / 2)], ["1024M", "3G"]);
        assert_eq!(html(false, &entry(b"d", Kind::Directory, 4096)).trim_end().len(), 19 + 48 + 1 + 17 + 1 + 7);
    }

    #[test]
    fn long_names_are_cut_before_they_are_escaped() {
        let line = html(true, &entry(&[b'>'; 51], Kind::File, 1));
        assert!(line.contains(&format!(">{}..&gt;</a> 09-Sep-2001 01:46 ", "&gt;".repeat(47))), "{line}");
        let line = html(true, &entry(&[b'x'; 50], Kind::Directory, 1));
        assert!(line.contains(&format!(">{}</a> 09-Sep-2001 01:46                   -\r\n", "x".repeat(50))), "{line}");
    }

    #[test]
    fn characters_are_counted_where_names_are_utf_8() {
        let line = |name: &str, is_utf8| {
            let mut out = Vec::new();
            let html = Html { uri: Vec::new(), exact_size: true, offset: 0, is_utf8 };
            html.write_entry(&entry(name.as_bytes(), Kind::File, 1), &mut out);
            String::from_utf8_lossy(&out).into_owned()
        };
        let (short, long) = ("ф".repeat(50), "ф".repeat(51));
        assert!(line(&short, true).contains(&format!(">{short}</a> 09-Sep")));
        assert!(line(&long, true).contains(&format!(">{}..&gt;</a> 09-Sep", "ф".repeat(47))));
        assert!(line(&short, false).contains(&format!(">{}\u{fffd}..&gt;</a> 09-Sep", "ф".repeat(23))));
    }

    #[test]
    fn names_of_functions_are_checked() {
        assert_eq!(check_callback(b""), Ok(None));
        assert_eq!(check_callback(b"a.B_1"), Ok(Some(b"a.B_1".to_vec())));
        assert_eq!(check_callback(b"alert()"), Err("invalid"));
        assert_eq!(check_callback(&[b'a'; 129]), Err("too long"));
    }
}

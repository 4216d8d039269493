//! Parsers of the core module's arguments: each turns a text into a setting, or an error with its place.

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{Diagnostic, Statement, Word, values};
use gale_engine::configuration::{Builder, ScopeRef};
use gale_files::RefusedLinks;
use gale_http::configuration::builder::{self, InHttp};
use gale_http::configuration::settings::{
    Aio, Alias, BodyInFile, CoreSettings, DisableSymlinks, ErrorPage, ErrorPageStatus, HeaderBuffers, IfModifiedSince,
    KeepaliveDisable, KeepaliveTimeout, LingeringClose, MinRate, Root, Satisfy, ServerTokens, TempPath, Types,
};
use gale_http::request::files::open_files::{OpenFileCache, Store};
use gale_http::request::files::thread_pool::PoolName;
use gale_http::request::post_action::PostAction;
use gale_http::request::slow::SlowRequestLog;
use gale_http::variables::template::{SizeTemplate, Template};
use gale_worker::traffic::Traffic;

use crate::core::log_level;
use crate::shared::figures;

pub(super) fn size(statement: &Statement) -> Result<usize, Diagnostic> {
    match size_or_none(statement)? {
        0 => Err(statement.directive_error("invalid value").at(statement.args[0].span)),
        size => Ok(size),
    }
}

/// Parses a size, or 0 for no buffer.
pub(super) fn size_or_none(statement: &Statement) -> Result<usize, Diagnostic> {
    let fitting = usize::try_from(values::size(statement)?).ok().filter(|&size| size <= SIZE_MAX);
    fitting.ok_or_else(|| statement.directive_error("invalid value").at(statement.args[0].span))
}

/// Larger buffers are rejected as typing errors.
const SIZE_MAX: usize = 1 << 30;

pub(crate) fn size_template(builder: &mut Builder, statement: &Statement) -> Result<SizeTemplate, Diagnostic> {
    crate::shared::size_template(builder, statement)
}

/// Parses `RATE [after=TIME]`.
pub(super) fn min_rate(statement: &Statement) -> Result<Option<MinRate>, Diagnostic> {
    let bytes_per_second = values::size(statement)?;
    let grace = match statement.args.get(1) {
        None => MIN_RATE_GRACE,
        Some(word) => {
            let time = word.text.strip_prefix(b"after=").and_then(units::parse_time);
            time.ok_or_else(|| {
                let error = Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span);
                error.hint("the second argument is after=TIME")
            })?
        }
    };
    Ok((bytes_per_second > 0).then_some(MinRate { bytes_per_second, grace }))
}

/// Default grace period: a slow start is not an attack.
const MIN_RATE_GRACE: Duration = Duration::from_secs(10);

pub(super) fn satisfy(statement: &Statement) -> Result<Satisfy, Diagnostic> {
    values::enumeration(statement, &[("all", Satisfy::All), ("any", Satisfy::Any)])
}

pub(super) fn count(statement: &Statement) -> Result<usize, Diagnostic> {
    let number = values::number(statement)?;
    Ok(usize::try_from(number).unwrap_or(usize::MAX))
}

pub(super) fn text(statement: &Statement) -> Result<Box<[u8]>, Diagnostic> {
    Ok(statement.args[0].text.as_slice().into())
}

pub(super) fn header_buffers(statement: &Statement) -> Result<HeaderBuffers, Diagnostic> {
    let (count, size) = values::buffers(statement)?;
    let fitting = |number: u64| usize::try_from(number).ok().filter(|&number| number <= SIZE_MAX);
    match (fitting(count), fitting(size)) {
        (Some(count), Some(size)) => Ok(HeaderBuffers { count, size }),
        _ => Err(statement.directive_error("invalid value")),
    }
}

pub(super) fn aio(builder: &mut Builder, statement: &Statement) -> Result<Aio, Diagnostic> {
    let word = &statement.args[0];
    Ok(match &**word.text {
        b"auto" => Aio::Auto,
        b"on" => Aio::On,
        b"off" => Aio::Off,
        b"threads" => Aio::Threads(None),
        text => match text.strip_prefix(b"threads=") {
            Some(name) => Aio::Threads(Some(PoolName::new(builder, &Word { text: name.into(), ..word.clone() })?)),
            None => {
                let hint = "it must be auto, on, off, threads or threads=POOL";
                return Err(statement.directive_error("invalid value").at(word.span).hint(hint));
            }
        },
    })
}

pub(super) fn directio(statement: &Statement) -> Result<u64, Diagnostic> {
    if statement.args[0].text == "off" { Ok(u64::MAX) } else { values::offset(statement) }
}

/// Parses a power of two, as the kernel requires.
pub(super) fn alignment(statement: &Statement) -> Result<u32, Diagnostic> {
    let alignment = values::offset(statement)?;
    let fitting = u32::try_from(alignment).ok().filter(|alignment| (1..=ALIGNMENT_MAX).contains(alignment));
    fitting.ok_or_else(|| statement.directive_error("invalid value").at(statement.args[0].span))
}

/// Upper bound: no device has larger blocks.
const ALIGNMENT_MAX: u32 = 1 << 20;

/// Parses `send_lowat`, also for connections to servers. On Linux nginx gives the same warning.
pub(crate) fn send_lowat(builder: &mut Builder, statement: &Statement) -> Result<u64, Diagnostic> {
    let size = values::size(statement)?;
    let message = format!("\"{}\" is not supported, ignored", statement.name.text);
    builder.note([Diagnostic::warn(message).at(statement.span)]);
    Ok(size)
}

pub(crate) fn temp_path(builder: &mut Builder, statement: &Statement) -> Result<TempPath, Diagnostic> {
    let level = |word: &Word| match units::parse_number(&word.text) {
        Some(length @ 1..=3) => Ok(length as u8),
        _ => Err(statement.directive_error("invalid value").at(word.span).hint("a level has 1 to 3 characters")),
    };
    let levels = statement.args[1..].iter().map(level).collect::<Result<_, _>>()?;
    Ok(TempPath { path: builder.full_path(&statement.args[0].text).into(), levels })
}

pub(super) fn keepalive_timeout(statement: &Statement) -> Result<KeepaliveTimeout, Diagnostic> {
    let advertised = match statement.args.get(1) {
        Some(word) => {
            let time = units::parse_time_seconds(&word.text);
            Some(time.ok_or_else(|| statement.directive_error("invalid value").at(word.span))?)
        }
        None => None,
    };
    Ok(KeepaliveTimeout { idle: values::time_ms(statement)?, advertised })
}

pub(super) fn keepalive_disable(
    builder: &mut Builder,
    statement: &Statement,
    earlier: Option<&KeepaliveDisable>,
) -> Result<KeepaliveDisable, Diagnostic> {
    const MSIE6: u32 = 1;
    const SAFARI: u32 = 1 << 1;
    const NONE: u32 = 1 << 2;
    let bit = |is_set, bit| if is_set { bit } else { 0 };
    let earlier = earlier.map(|earlier| bit(earlier.msie6, MSIE6) | bit(earlier.safari, SAFARI));
    let choices = [("none", NONE), ("msie6", MSIE6), ("safari", SAFARI)];
    let bits = values::bitmask(statement, &choices, earlier.as_ref(), builder)?;
    Ok(KeepaliveDisable { msie6: bits & MSIE6 != 0, safari: bits & SAFARI != 0 })
}

pub(super) fn body_in_file(statement: &Statement) -> Result<BodyInFile, Diagnostic> {
    let choices = [("off", BodyInFile::Off), ("on", BodyInFile::On), ("clean", BodyInFile::Clean)];
    values::enumeration(statement, &choices)
}

pub(super) fn lingering_close(statement: &Statement) -> Result<LingeringClose, Diagnostic> {
    let choices = [("off", LingeringClose::Off), ("on", LingeringClose::On), ("always", LingeringClose::Always)];
    values::enumeration(statement, &choices)
}

pub(super) fn if_modified_since(statement: &Statement) -> Result<IfModifiedSince, Diagnostic> {
    let choices =
        [("off", IfModifiedSince::Off), ("exact", IfModifiedSince::Exact), ("before", IfModifiedSince::Before)];
    values::enumeration(statement, &choices)
}

pub(super) fn server_tokens(builder: &mut Builder, statement: &Statement) -> Result<ServerTokens, Diagnostic> {
    let word = &statement.args[0];
    Ok(match &**word.text {
        b"on" => ServerTokens::On,
        b"off" => ServerTokens::Off,
        b"build" => ServerTokens::Build,
        _ => ServerTokens::Text(builder.http_mut().template(word)?),
    })
}

pub(super) fn root(builder: &mut Builder, statement: &Statement) -> Result<Root, Diagnostic> {
    directory(builder, statement, None)
}

/// Parses `alias`, which shares the slot of `root`; the row of `root` inherits and completes it.
pub(super) fn alias(core: &mut CoreSettings, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if let Some(earlier) = core.root.get_opt() {
        let duplicate = match earlier.alias {
            Some(_) => statement.directive_error("is duplicate"),
            None => statement.directive_error("is duplicate, \"root\" directive was specified earlier"),
        };
        return Err(match core.root.span() {
            Some(first) => duplicate.related("first set", first),
            None => duplicate,
        });
    }
    let alias = match builder.scope {
        ScopeRef::Block(scope) => builder.http_mut().alias_of(scope),
        ScopeRef::Main => None,
    };
    let alias =
        alias.ok_or_else(|| statement.error("the \"alias\" directive cannot be used inside the named location"))?;
    core.root.set(directory(builder, statement, Some(alias))?, Some(statement.span));
    Ok(())
}

fn directory(builder: &mut Builder, statement: &Statement, alias: Option<Alias>) -> Result<Root, Diagnostic> {
    let word = &statement.args[0];
    for (refused, braced) in [("document_root", "{document_root}"), ("realpath_root", "{realpath_root}")] {
        if word.text.split_str("$").skip(1).any(|rest| rest.starts_with_str(refused) || rest.starts_with_str(braced)) {
            let name = &statement.name.text;
            let message = format!("the ${refused} variable cannot be used in the \"{name}\" directive");
            return Err(Diagnostic::emerg(message).at(word.span));
        }
    }
    let mut path = word.clone();
    if alias.is_none() && path.text.len() > 1 && path.text.ends_with(b"/") {
        path.text.pop();
    }
    let mut base = None;
    if path.text.starts_with(b"$") {
        base = Some(builder.full_path(b"").as_os_str().as_bytes().strip_suffix(b"/").unwrap_or_default().into());
    } else {
        path.text = builder.full_path(&path.text).as_os_str().as_bytes().into();
    }
    Ok(Root { path: builder.http_mut().template(&path)?, base, alias })
}

pub(super) fn disable_symlinks(builder: &mut Builder, statement: &Statement) -> Result<DisableSymlinks, Diagnostic> {
    let (mut refused, mut from) = (None, None);
    for word in &statement.args {
        match &**word.text {
            b"off" => refused = Some(None),
            b"on" => refused = Some(Some(RefusedLinks::All)),
            b"if_not_owner" => refused = Some(Some(RefusedLinks::Foreign)),
            text => match text.strip_prefix(b"from=") {
                Some(part) => from = Some(builder.http_mut().template(&Word { text: part.into(), ..word.clone() })?),
                None => return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
            },
        }
    }
    let Some(refused) = refused else {
        let must = "must have \"off\", \"on\" or \"if_not_owner\" parameter";
        return Err(statement.error(format!("\"{}\" {must}", statement.name.text)));
    };
    match (&statement.args[..], refused, &from) {
        ([first, second], _, None) => {
            Err(statement.error(format!("duplicate parameters \"{} {}\"", first.text, second.text)))
        }
        (_, None, Some(_)) => Err(statement.error("\"from=\" cannot be used with \"off\" parameter")),
        _ => Ok(DisableSymlinks { refused, from }),
    }
}

pub(super) fn open_file_cache(statement: &Statement) -> Result<OpenFileCache, Diagnostic> {
    let mut entries_max = None;
    let mut inactive = Duration::from_secs(60);
    let mut is_off = false;
    for word in &statement.args {
        let invalid = || {
            let message = format!("invalid \"open_file_cache\" parameter \"{}\"", word.text);
            Diagnostic::emerg(message).at(word.span).hint("it must be off, or max=N [inactive=TIME]")
        };
        if let Some(number) = word.text.strip_prefix(b"max=") {
            entries_max = Some(units::parse_number(number).filter(|&number| number > 0).ok_or_else(invalid)?);
        } else if let Some(time) = word.text.strip_prefix(b"inactive=") {
            inactive = units::parse_time_seconds(time).ok_or_else(invalid)?;
        } else if word.text == "off" {
            is_off = true;
        } else {
            return Err(invalid());
        }
    }
    if is_off {
        return Ok(OpenFileCache::Off);
    }
    let entries_max =
        entries_max.ok_or_else(|| statement.error("\"open_file_cache\" must have the \"max\" parameter"))?;
    Ok(OpenFileCache::Store(Store::new(entries_max, inactive)))
}

pub(super) fn internal(core: &mut CoreSettings, _: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if core.internal.is_set() {
        return Err(statement.directive_error("is duplicate"));
    }
    core.internal.set(true, Some(statement.span));
    Ok(())
}

/// Parses `status_zone ZONE` of a server.
pub(super) fn server_zone(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let zone = builder.figures(figures::HTTP_SERVERS, &statement.args[0].text);
    if builder::set_server_zone(builder, zone) { Ok(()) } else { Err(statement.directive_error("is duplicate")) }
}

/// Parses `status_zone ZONE | off` of a location.
pub(super) fn location_zone(builder: &mut Builder, statement: &Statement) -> Result<Option<Arc<Traffic>>, Diagnostic> {
    let name = &statement.args[0].text;
    Ok((name != "off").then(|| builder.figures(figures::HTTP_LOCATIONS, name)))
}

/// Parses `slow_request_log off | TIME [LEVEL]`.
pub(super) fn slow_request_log(_: &mut Builder, statement: &Statement) -> Result<Option<SlowRequestLog>, Diagnostic> {
    if statement.args[0].text == "off" {
        return match statement.args.get(1) {
            None => Ok(None),
            Some(word) => Err(statement.error(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
        };
    }
    let time = values::time_ms(statement)?;
    let level = statement.args.get(1).map_or(Ok(Level::Warn), log_level)?;
    Ok(Some(SlowRequestLog { time, level }))
}

/// Parses `types { TYPE EXTENSION ...; }`; several blocks of one level add up.
pub(super) fn types(core: &mut CoreSettings, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut types = match core.types.get_opt() {
        Some(earlier) => earlier.0.clone(),
        None => Default::default(),
    };
    for entry in statement.body() {
        if let Some(error) = &entry.broken {
            return Err((**error).clone());
        }
        if entry.block.is_some() {
            return Err(entry.error("unexpected \"{\"").hint("an entry is written TYPE EXTENSION ...;"));
        }
        for extension in &entry.args {
            let key = extension.text.to_ascii_lowercase().into_boxed_slice();
            let earlier = types.insert(key, entry.name.text.as_slice().into());
            if let Some(earlier) = earlier {
                let message = format!(
                    "duplicate extension \"{}\", content type: \"{}\", previous content type: \"{}\"",
                    extension.text,
                    entry.name.text,
                    earlier.as_bstr()
                );
                builder.note([Diagnostic::warn(message).at(extension.span)]);
            }
        }
    }
    core.types.set(Arc::new(Types(types)), Some(statement.span));
    Ok(())
}

pub(super) fn default_types() -> Types {
    let rows: [(&[u8], &[u8]); 3] = [(b"html", b"text/html"), (b"gif", b"image/gif"), (b"jpg", b"image/jpeg")];
    Types(rows.into_iter().map(|(extension, media_type)| (extension.into(), media_type.into())).collect())
}

/// Parses `early_hints STRING ...`; several of one level add up.
pub(super) fn early_hints(
    core: &mut CoreSettings,
    builder: &mut Builder,
    statement: &Statement,
) -> Result<(), Diagnostic> {
    let mut texts = core.early_hints.take().unwrap_or_default();
    for word in &statement.args {
        texts.push(builder.http_mut().template(word)?);
    }
    core.early_hints.set(texts, Some(statement.span));
    Ok(())
}

/// Parses `post_action URI|@NAME`.
pub(super) fn post_action(statement: &Statement) -> Result<PostAction, Diagnostic> {
    let text = &statement.args[0].text;
    Ok(match text.strip_prefix(b"@") {
        // An argument that is not a path is a named location, even without its @. (nginx finds nothing then.)
        None if !text.starts_with(b"/") => PostAction::Named(text.as_slice().into()),
        None => PostAction::Path(text.as_slice().into()),
        Some(name) => PostAction::Named(name.into()),
    })
}

/// Parses `error_page CODE ... [=[RESPONSE]] URI`.
pub(super) fn error_page(
    core: &mut CoreSettings,
    builder: &mut Builder,
    statement: &Statement,
) -> Result<(), Diagnostic> {
    let (target, rest) = statement.args.split_last().expect("two arguments at least");
    let (answer, codes) = match rest.split_last() {
        Some((word, codes)) if word.text.starts_with(b"=") => (replacement(word)?, codes),
        _ => (ErrorPageStatus::Keep, rest),
    };
    if codes.is_empty() {
        let word = &rest[0];
        let error = Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span);
        return Err(error.hint("at least one code must precede the URI"));
    }
    let target: Template = builder.http_mut().template(target)?;
    let mut pages = core.error_page.take().unwrap_or_default();
    for word in codes {
        let status = status_of(word)?;
        pages.push(ErrorPage { status, answer, target: target.clone() });
    }
    core.error_page.set(pages, Some(statement.span));
    Ok(())
}

fn replacement(word: &Word) -> Result<ErrorPageStatus, Diagnostic> {
    let text = &word.text[1..];
    if text.is_empty() {
        return Ok(ErrorPageStatus::OfTarget);
    }
    let status = units::parse_number(text).and_then(|number| u16::try_from(number).ok());
    status
        .map(ErrorPageStatus::Replace)
        .ok_or_else(|| Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span))
}

fn status_of(word: &Word) -> Result<u16, Diagnostic> {
    let number = units::parse_number(&word.text)
        .ok_or_else(|| Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span))?;
    match u16::try_from(number) {
        Ok(499) => Err(Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span)),
        Ok(status @ 300..=599) => Ok(status),
        _ => {
            let message = format!("value \"{}\" must be between 300 and 599", word.text);
            Err(Diagnostic::emerg(message).at(word.span))
        }
    }
}

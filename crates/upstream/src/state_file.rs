//! File of `state`: the servers of a group, one `server …;` on each line, in place of those in the configuration.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#state>)
//!
//! Without the file the group has no servers. The worker process writes it when servers are changed at run time, so its
//! user needs permission to create files in the directory.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use gale_config::{Diagnostic, Files, Severity, Sources, Span, Statement, parse};
use gale_engine::configuration::{Builder, ScopeRef};
use gale_engine::variables::subject::Subject;
use gale_process::Resources;

use super::peer::{ServerSettings, Standing};
use super::registry::{HasUpstreams, upstreams_of};
use super::servers::GroupServer;

/// Reads the state files of all groups, as if their contents were in the groups' blocks.
pub(super) fn read<S: Subject>(builder: &mut Builder, resources: &mut dyn Resources) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let groups = upstreams_of::<S>(builder).with_state();
    for (group, path, span) in groups {
        if let Some(directory) = path.parent() {
            builder.reach.writes_below(directory);
        }
        let mut sources = Sources::new();
        let Some(statements) = statements(&path, span, &mut sources, resources)? else { continue };
        let known = upstreams_of::<S>(builder).enter(group);
        let earlier = std::mem::take(&mut builder.diagnostics);
        builder.walk(&statements, S::Block::INSIDE, ScopeRef::Main);
        let found = std::mem::replace(&mut builder.diagnostics, earlier);
        // Their places refer to a separate text.
        upstreams_of::<S>(builder).current().servers[known..].iter_mut().for_each(|server| server.span = span);
        builder.note(found.iter().map(|diagnostic| at_state(diagnostic, &sources, span)));
    }
    Ok(())
}

fn statements(
    path: &Path,
    span: Span,
    sources: &mut Sources,
    resources: &mut dyn Resources,
) -> Result<Option<Vec<Statement>>, Diagnostic> {
    let files: &mut dyn Files = resources;
    if let Err(error) = files.read(path)
        && error.kind() == io::ErrorKind::NotFound
    {
        return Ok(None);
    }
    let directory = path.parent().unwrap_or(Path::new("/"));
    let parsed = parse(sources, files, path, directory).map_err(|error| at_state(&error, sources, span))?;
    if let Some(error) = parsed.errors.first_error() {
        return Err(at_state(error, sources, span));
    }
    if let Some(other) = parsed.statements.iter().find(|statement| statement.name.text != "server") {
        let message = format!("unexpected \"{}\"", other.name.text);
        return Err(at_state(&Diagnostic::emerg(message).at(other.name.span), sources, span));
    }
    Ok(Some(parsed.statements))
}

/// Writes the servers of a group, replacing the whole file atomically. Blocks.
///
/// # Errors
/// Errors of the system; the file is then unchanged.
pub(super) fn write(path: &Path, servers: &[GroupServer]) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let temporary = Path::new(&name);
    // A file left by a killed process may have other permissions.
    let _ = fs::remove_file(temporary);
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o644);
    let written = options.open(temporary).and_then(|mut file| {
        file.write_all(text(servers).as_bytes())?;
        file.sync_data()
    });
    let replaced = written.and_then(|()| fs::rename(temporary, path));
    if replaced.is_err() {
        let _ = fs::remove_file(temporary);
    }
    replaced
}

/// The servers as directives.
fn text(servers: &[GroupServer]) -> String {
    let mut text = String::new();
    for GroupServer { name, settings, .. } in servers {
        let default = ServerSettings::default();
        let ServerSettings { weight, max_conns, max_fails, fail_timeout, slow_start, is_backup, standing, route } =
            &**settings;
        text.push_str("server ");
        push_quoted(&mut text, &String::from_utf8_lossy(name));
        let mut number = |name: &str, value: u128, default: u128| {
            if value != default {
                let _ = write!(text, " {name}={value}");
            }
        };
        number("weight", (*weight).into(), default.weight.into());
        number("max_conns", (*max_conns).into(), default.max_conns.into());
        number("max_fails", (*max_fails).into(), default.max_fails.into());
        number("fail_timeout", fail_timeout.as_secs().into(), default.fail_timeout.as_secs().into());
        if !slow_start.is_zero() {
            let _ = write!(text, " slow_start={}ms", slow_start.as_millis());
        }
        if let Some(route) = route {
            text.push(' ');
            push_quoted(&mut text, &format!("route={route}"));
        }
        if *is_backup {
            text.push_str(" backup");
        }
        text.push_str(match standing {
            Standing::Up => "",
            Standing::Draining => " drain",
            Standing::Down => " down",
        });
        text.push_str(";\n");
    }
    text
}

/// Appends a word of the configuration, quoted if needed.
fn push_quoted(text: &mut String, word: &str) {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b':' | b'-' | b'_' | b'/' | b'=');
    if word.bytes().all(is_plain) && !word.starts_with('[') {
        text.push_str(word);
        return;
    }
    text.push('"');
    for character in word.chars() {
        if matches!(character, '"' | '\\') {
            text.push('\\');
        }
        text.push(character);
    }
    text.push('"');
}

/// The same diagnostic, reported at the directive that names the file.
fn at_state(diagnostic: &Diagnostic, sources: &Sources, span: Span) -> Diagnostic {
    let message = diagnostic.line(sources);
    let told = match diagnostic.severity {
        Severity::Emerg => Diagnostic::emerg(message),
        Severity::Warn => Diagnostic::warn(message),
        Severity::Notice => Diagnostic::notice(message),
    };
    diagnostic.hint.iter().fold(told.at(span), |told, hint| told.hint(hint.as_str()))
}

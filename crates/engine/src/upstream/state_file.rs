//! The file of `state`: the servers of a group, one `server …;` a line, in place of those in the configuration.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#state>)
//!
//! A file that is not there is a group without servers.

use std::io;
use std::path::Path;

use gale_config::{Diagnostic, Files, Severity, Sources, Span, Statement, parse};
use gale_process::Resources;

use super::registry::HasUpstreams;
use crate::configuration::{Builder, ScopeRef};
use crate::variables::subject::Subject;

/// Reads the state files of all groups, as if what they say stood in the group's block.
pub(super) fn read<S: Subject>(builder: &mut Builder, resources: &mut dyn Resources) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let groups = builder.upstreams::<S>().with_state();
    for (group, path, span) in groups {
        let mut sources = Sources::new();
        let Some(statements) = statements(&path, span, &mut sources, resources)? else { continue };
        let known = builder.upstreams::<S>().enter(group);
        let earlier = std::mem::take(&mut builder.diagnostics);
        builder.walk(&statements, S::Block::INSIDE, ScopeRef::Main);
        let found = std::mem::replace(&mut builder.diagnostics, earlier);
        // The places lie in a text that nobody else has.
        builder.upstreams::<S>().current().servers[known..].iter_mut().for_each(|server| server.span = span);
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

/// The same, told at the directive that names the file.
fn at_state(diagnostic: &Diagnostic, sources: &Sources, span: Span) -> Diagnostic {
    let message = diagnostic.line(sources);
    let told = match diagnostic.severity {
        Severity::Emerg => Diagnostic::emerg(message),
        Severity::Warn => Diagnostic::warn(message),
        Severity::Notice => Diagnostic::notice(message),
    };
    diagnostic.hint.iter().fold(told.at(span), |told, hint| told.hint(hint.as_str()))
}

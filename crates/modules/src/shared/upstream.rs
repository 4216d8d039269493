//! upstream: groups of servers, for any protocol.
//!   upstream NAME { ... }
//!   server ADDRESS [weight=N] [max_conns=N] [max_fails=N] [fail_timeout=TIME] [backup] [down];
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html>)

use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Statement, Takes, Word};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::server_address::ServerAddress;
use gale_engine::upstream::{HasUpstreams, ServerDraft, ServerSettings, ServerSource, Standing};
use gale_engine::variables::subject::Subject;
use gale_runtime::SocketAddress;

/// The port of a server without one.
const PORT_DEFAULT: u16 = 80;

/// The directives for groups that are declared in `around`.
pub const fn directives<S: Subject>(around: Contexts) -> [Directive; 2]
where
    S::Block: HasUpstreams<S>,
{
    let inside = S::Block::INSIDE;
    [
        Directive {
            name: "upstream",
            contexts: around,
            takes: Takes::Exactly(1),
            body: Body::Block,
            default: "",
            about: "A group of servers that requests may be passed to.",
            store: const { &Custom(block::<S>) },
        },
        Directive {
            name: "server",
            contexts: inside,
            takes: Takes::AtLeast(1),
            body: Body::None,
            default: "",
            about: "A server of the group: its address and how much it is to be used.",
            store: const { &Custom(server::<S>) },
        },
    ]
}

fn block<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let name = &statement.args[0];
    let span = name.span;
    builder.upstreams::<S>().open(&name.text, span)?;
    let scope = builder.scope;
    builder.walk(statement.body(), S::Block::INSIDE, scope);
    if builder.upstreams::<S>().current().servers.is_empty() {
        return Err(Diagnostic::emerg("no servers are inside upstream").at(statement.block_end.unwrap_or(span)));
    }
    Ok(())
}

fn invalid_parameter(word: &Word) -> Diagnostic {
    Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)
}

fn server<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let (name, parameters) = statement.args.split_first().expect("an argument");
    let mut settings = ServerSettings::default();
    for word in parameters {
        parameter(&mut settings, word).ok_or_else(|| invalid_parameter(word))?;
    }
    let failed = |what: &str| Diagnostic::emerg(format!("{what} in upstream \"{}\"", name.text)).at(name.span);
    let source = match ServerAddress::parse(&name.text, PORT_DEFAULT).map_err(failed)? {
        ServerAddress::Inet(address) => ServerSource::Address(SocketAddress::Inet(address)),
        ServerAddress::Unix(path) => ServerSource::Address(SocketAddress::unix(path)),
        ServerAddress::Host(host, port) => ServerSource::Host(host, port),
    };
    let server = ServerDraft { name: name.text.clone(), span: name.span, source, settings };
    builder.upstreams::<S>().current().servers.push(server);
    Ok(())
}

/// Takes a parameter over; `None` if it is none.
fn parameter(settings: &mut ServerSettings, word: &Word) -> Option<()> {
    let number = |text| units::parse_number(text).and_then(|number| u32::try_from(number).ok());
    let text: &[u8] = &word.text;
    if let Some(value) = text.strip_prefix(b"weight=") {
        settings.weight = number(value).filter(|&weight| weight > 0)?;
    } else if let Some(value) = text.strip_prefix(b"max_conns=") {
        settings.max_conns = number(value)?;
    } else if let Some(value) = text.strip_prefix(b"max_fails=") {
        settings.max_fails = number(value)?;
    } else if let Some(value) = text.strip_prefix(b"fail_timeout=") {
        settings.fail_timeout = units::parse_time_seconds(value)?;
    } else {
        match text {
            b"backup" => settings.is_backup = true,
            b"down" => settings.standing = Standing::Down,
            _ => return None,
        }
    }
    Some(())
}

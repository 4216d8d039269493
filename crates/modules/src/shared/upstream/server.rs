//! Parser of `server ADDRESS …` in a group.

use gale_base::units;
use gale_config::server_address::ServerAddress;
use gale_config::{Diagnostic, Statement, Word};
use gale_engine::configuration::Builder;
use gale_engine::variables::subject::Subject;
use gale_runtime::SocketAddress;
use gale_upstream::{
    Balance, HasUpstreams, ROUTE_LENGTH_MAX, ServerDraft, ServerSettings, ServerSource, Standing, upstreams_of,
};

use crate::shared::limits::invalid_parameter;

/// Port of a server that names none.
const PORT_DEFAULT: u16 = 80;

/// The parameters of one server.
#[derive(Default)]
struct Parameters {
    settings: ServerSettings,
    is_resolved: bool,
    service: Option<String>,
}

pub(super) fn server<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let group = upstreams_of::<S>(builder).current();
    let balance = group.balance.get_opt().copied().unwrap_or_default();
    let (name, words) = statement.args.split_first().expect("an argument");
    let mut parameters = Parameters::default();
    for word in words {
        if !is_supported(balance, &word.text) {
            let message = format!("balancing method does not support parameter \"{}\"", word.text);
            return Err(Diagnostic::emerg(message).at(word.span));
        }
        parameters.take(word)?;
    }
    let source = source(name, &parameters)?;
    let server = ServerDraft { name: name.text.clone(), span: name.span, source, settings: parameters.settings };
    upstreams_of::<S>(builder).current().servers.push(server);
    Ok(())
}

/// Returns `true` if the group's method supports a parameter.
fn is_supported(balance: Balance, parameter: &[u8]) -> bool {
    balance.has_backups() || parameter != b"backup" && !parameter.starts_with(b"slow_start=")
}

impl Parameters {
    fn take(&mut self, word: &Word) -> Result<(), Diagnostic> {
        let wrong = |message: String| Diagnostic::emerg(message).at(word.span);
        let text: &[u8] = &word.text;
        if let Some(route) = text.strip_prefix(b"route=") {
            if route.is_empty() {
                return Err(wrong("route is empty".to_owned()));
            }
            if route.len() > ROUTE_LENGTH_MAX {
                return Err(wrong(format!("route is longer than {ROUTE_LENGTH_MAX}")));
            }
            let route = std::str::from_utf8(route).map_err(|_| invalid_parameter(word))?;
            self.settings.route = Some(route.into());
        } else if let Some(service) = text.strip_prefix(b"service=") {
            if service.is_empty() {
                return Err(wrong("service is empty".to_owned()));
            }
            self.service = Some(String::from_utf8(service.to_vec()).map_err(|_| invalid_parameter(word))?);
        } else if text == b"resolve" {
            self.is_resolved = true;
        } else {
            take_setting(&mut self.settings, text).ok_or_else(|| invalid_parameter(word))?;
        }
        Ok(())
    }
}

/// Applies a parameter. Returns `None` if it is unknown or invalid.
fn take_setting(settings: &mut ServerSettings, text: &[u8]) -> Option<()> {
    let number = |text| units::parse_number(text).and_then(|number| u32::try_from(number).ok());
    if let Some(value) = text.strip_prefix(b"weight=") {
        settings.weight = number(value).filter(|&weight| weight > 0)?;
    } else if let Some(value) = text.strip_prefix(b"max_conns=") {
        settings.max_conns = number(value)?;
    } else if let Some(value) = text.strip_prefix(b"max_fails=") {
        settings.max_fails = number(value)?;
    } else if let Some(value) = text.strip_prefix(b"fail_timeout=") {
        settings.fail_timeout = units::parse_time_seconds(value)?;
    } else if let Some(value) = text.strip_prefix(b"slow_start=") {
        settings.slow_start = units::parse_time(value)?;
    } else {
        match text {
            b"backup" => settings.is_backup = true,
            b"down" => settings.standing = Standing::Down,
            b"drain" => settings.standing = Standing::Draining,
            _ => return None,
        }
    }
    Some(())
}

fn source(name: &Word, parameters: &Parameters) -> Result<ServerSource, Diagnostic> {
    let wrong_service =
        |what: &str| Diagnostic::emerg(format!("service upstream \"{}\" {what}", name.text)).at(name.span);
    let Parameters { is_resolved, service, .. } = parameters;
    if service.is_some() && !is_resolved {
        return Err(wrong_service("requires \"resolve\" parameter"));
    }
    let failed = |what: &str| Diagnostic::emerg(format!("{what} in upstream \"{}\"", name.text)).at(name.span);
    let address = ServerAddress::parse(&name.text, PORT_DEFAULT).map_err(failed)?;
    let has_port = match &address {
        ServerAddress::Unix(_) => false,
        ServerAddress::Inet(_) | ServerAddress::Host(..) => {
            name.text.rsplit(|&byte| byte == b']').next().is_some_and(|rest| rest.contains(&b':'))
        }
    };
    if service.is_some() && has_port {
        return Err(wrong_service("may not have port"));
    }
    match address {
        ServerAddress::Host(host, port) if *is_resolved => {
            Ok(ServerSource::Resolved { host, service: service.clone(), port })
        }
        ServerAddress::Host(host, port) => Ok(ServerSource::Host(host, port)),
        _ if service.is_some() => Err(wrong_service("requires domain name")),
        ServerAddress::Inet(address) => Ok(ServerSource::Address(SocketAddress::Inet(address))),
        ServerAddress::Unix(path) => Ok(ServerSource::Address(SocketAddress::unix(path))),
    }
}

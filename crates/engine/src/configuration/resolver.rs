//! Parser of `resolver ADDRESS ... [valid=TIME] [ipv4=on|off] [ipv6=on|off] [status_zone=ZONE]`.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#resolver>)

use gale_base::units;
use gale_config::server_address::ServerAddress;
use gale_config::{Diagnostic, Statement, Word};
use gale_resolver::{NameServer, ResolverSettings};

use super::builder::Builder;

/// Kind of the counters of name servers, by zone name.
pub const RESOLVERS: &str = "resolver";

const PORT_DEFAULT: u16 = 53;

/// Parses the directive `resolver`.
///
/// # Errors
/// The fault, in nginx's words.
pub fn parse_resolver(builder: &mut Builder, statement: &Statement) -> Result<ResolverSettings, Diagnostic> {
    let mut settings = ResolverSettings::new([]);
    for word in &statement.args {
        let invalid = || Diagnostic::emerg(format!("invalid parameter: {}", word.text)).at(word.span);
        let flag = |value: &[u8]| match value {
            b"on" => Ok(true),
            b"off" => Ok(false),
            _ => Err(invalid().hint("it must be \"on\" or \"off\"")),
        };
        if let Some(time) = word.text.strip_prefix(b"valid=") {
            let hint = "valid= takes a time: valid=30s";
            settings.valid = Some(units::parse_time_seconds(time).ok_or_else(|| invalid().hint(hint))?);
        } else if let Some(value) = word.text.strip_prefix(b"ipv4=") {
            settings.ipv4 = flag(value)?;
        } else if let Some(value) = word.text.strip_prefix(b"ipv6=") {
            settings.ipv6 = flag(value)?;
        } else if word.text.starts_with(b"status_zone=") {
            let name = word.text.strip_prefix(b"status_zone=").unwrap_or_default();
            if name.is_empty() {
                return Err(invalid());
            }
            settings.zone = Some(builder.figures(RESOLVERS, name));
        } else {
            settings.servers.push(name_server(builder, word)?);
        }
    }
    if !settings.ipv4 && !settings.ipv6 {
        return Err(statement.error("\"ipv4\" and \"ipv6\" cannot both be \"off\""));
    }
    if settings.servers.is_empty() {
        return Err(statement.error("no name servers defined"));
    }
    Ok(settings)
}

fn name_server(builder: &mut Builder, word: &Word) -> Result<NameServer, Diagnostic> {
    let failed = |what: &str| Diagnostic::emerg(format!("{what} in resolver \"{}\"", word.text)).at(word.span);
    match ServerAddress::parse(&word.text, PORT_DEFAULT).map_err(failed)? {
        ServerAddress::Inet(address) => {
            builder.reach.connects(address.port());
            Ok(NameServer::Address(address))
        }
        ServerAddress::Host(host, port) => {
            builder.reach.connects(port);
            Ok(NameServer::Host(builder.host_addresses_of(host, word, "resolver"), port))
        }
        // nginx accepts it, but never gets a response.
        ServerAddress::Unix(_) => Err(failed("invalid host").hint("name servers are queried over UDP and TCP")),
    }
}

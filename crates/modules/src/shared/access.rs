//! access: who may, by address.
//!   allow ADDRESS | CIDR | unix: | all;                          http, server, location, limit_except
//!   deny  ADDRESS | CIDR | unix: | all;                          http, server, location, limit_except
//! (<https://nginx.org/en/docs/http/ngx_http_access_module.html>)
//!
//! The first rule that fits decides. A level with rules of its own takes none from outside.

use std::net::IpAddr;

use gale_base::cidr::Cidr;
use gale_base::log_level::Level;
use gale_config::{Body, Diagnostic, ManyWith, Place, Reporter, Setting, Statement, Takes, slot};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::settings::Satisfy;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_runtime::SocketAddress;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_access",
    directives: &[
        Directive {
            name: "allow",
            about: "Lets clients with these addresses in.",
            store: &ManyWith { parse: |builder, statement| rule(builder, statement, true), slot: slot!(Conf, rules) },
            ..RULE
        },
        Directive {
            name: "deny",
            about: "Keeps clients with these addresses out.",
            store: &ManyWith { parse: |builder, statement| rule(builder, statement, false), slot: slot!(Conf, rules) },
            ..RULE
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(Phase::Access, &Decide { applies: |conf: &Conf| !conf.rules.get().is_empty(), run })],
        ..HttpPart::EMPTY
    }],
    ..Module::EMPTY
};

/// What the directives have in common.
const RULE: Directive = Directive {
    name: "",
    place: Place::ANYWHERE.or(Place::LIMIT_EXCEPT),
    takes: Takes::Exactly(1),
    body: Body::None,
    default: "",
    about: "",
    store: &gale_config::Inert,
};

#[derive(Default)]
struct Conf {
    rules: Setting<Vec<Rule>>,
}

#[derive(Clone, Debug)]
struct Rule {
    who: Who,
    allows: bool,
}

#[derive(Clone, Copy, Debug)]
enum Who {
    All,
    Unix,
    Network(Cidr),
}

fn rule(builder: &mut Builder, statement: &Statement, allows: bool) -> Result<Rule, Diagnostic> {
    let word = &statement.args[0];
    let who = match &**word.text {
        b"all" => Who::All,
        b"unix:" => Who::Unix,
        text => {
            let (network, has_low_bits) = Cidr::parse(text).ok_or_else(|| {
                let error = Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span);
                error.hint("it must be an address, a network as 192.0.2.0/24, \"unix:\" or \"all\"")
            })?;
            if has_low_bits {
                let message = format!("low address bits of {} are meaningless", word.text);
                builder.report(Diagnostic::warn(message).at(word.span));
            }
            Who::Network(network)
        }
    };
    Ok(Rule { who, allows })
}

fn run(request: &mut Request, conf: &Conf) -> Flow {
    match decide(conf.rules.get(), request.remote()) {
        None => Flow::Next,
        Some(true) => Flow::Allow,
        Some(false) => {
            if *request.scope().core.satisfy.get() == Satisfy::All {
                request.log(Level::Error, format_args!("access forbidden by rule"));
            }
            Flow::Respond(403)
        }
    }
}

/// What the first rule that fits says.
fn decide(rules: &[Rule], client: &SocketAddress) -> Option<bool> {
    let address = client.inet().map(|address| unmapped(address.ip(), rules));
    let fits = |rule: &&Rule| match (rule.who, address) {
        (Who::All, _) | (Who::Unix, None) => true,
        (Who::Network(network), Some(address)) => network.contains(address),
        (Who::Unix, Some(_)) | (Who::Network(_), None) => false,
    };
    rules.iter().find(fits).map(|rule| rule.allows)
}

/// A client that came over IPv6 with an address of IPv4 is one of IPv4, wherever there are rules for such.
fn unmapped(address: IpAddr, rules: &[Rule]) -> IpAddr {
    let is_for_v4 = |rule: &Rule| match rule.who {
        Who::All => true,
        Who::Unix => false,
        Who::Network(network) => network.is_v4(),
    };
    match address {
        IpAddr::V6(v6) if rules.iter().any(is_for_v4) => v6.to_ipv4_mapped().map_or(address, IpAddr::V4),
        _ => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &[(&str, bool)]) -> Vec<Rule> {
        let who = |text: &str| match text {
            "all" => Who::All,
            "unix:" => Who::Unix,
            text => Who::Network(Cidr::parse(text.as_bytes()).unwrap().0),
        };
        text.iter().map(|&(text, allows)| Rule { who: who(text), allows }).collect()
    }

    #[track_caller]
    fn decides(text: &[(&str, bool)], client: &str) -> Option<bool> {
        let address = match client {
            "unix:" => SocketAddress::Unix(None),
            client => SocketAddress::Inet((client.parse::<IpAddr>().unwrap(), 1).into()),
        };
        decide(&rules(text), &address)
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let some = [("192.0.2.7", false), ("192.0.2.0/24", true), ("2001:db8::/32", true), ("all", false)];
        assert_eq!(decides(&some, "192.0.2.7"), Some(false));
        assert_eq!(decides(&some, "192.0.2.8"), Some(true));
        assert_eq!(decides(&some, "2001:db8::1"), Some(true));
        assert_eq!(decides(&some, "::1"), Some(false));
        assert_eq!(decides(&some, "unix:"), Some(false));
        assert_eq!(decides(&some[..3], "unix:"), None);
        assert_eq!(decides(&[("unix:", true)], "unix:"), Some(true));
        assert_eq!(decides(&[("unix:", false)], "127.0.0.1"), None);
    }

    #[test]
    fn mapped_addresses_are_of_ipv4_where_ipv4_has_rules() {
        assert_eq!(decides(&[("192.0.2.0/24", false)], "::ffff:192.0.2.1"), Some(false));
        assert_eq!(decides(&[("192.0.2.0/24", false), ("::/0", true)], "::ffff:198.51.100.1"), None);
        assert_eq!(decides(&[("::ffff:0:0/96", false)], "::ffff:192.0.2.1"), Some(false));
    }
}

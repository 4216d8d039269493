//! access: access control by client address.
//!   allow ADDRESS | CIDR | unix: | all;                          http, stream
//!   deny  ADDRESS | CIDR | unix: | all;                          http, stream
//! (<https://nginx.org/en/docs/http/ngx_http_access_module.html>)
//!
//! The first matching rule decides. A level with rules of its own inherits none.

use std::net::IpAddr;

use gale_base::cidr::Cidr;
use gale_config::{Diagnostic, Reporter, Statement};
use gale_engine::configuration::Builder;
use gale_runtime::SocketAddress;

/// An `allow` or `deny` rule.
#[derive(Clone, Debug)]
pub struct Rule {
    who: Who,
    allows: bool,
}

#[derive(Clone, Copy, Debug)]
enum Who {
    All,
    Unix,
    Network(Cidr),
}

/// Parses an `allow` or a `deny`.
///
/// # Errors
/// The argument is not a valid address, network or keyword.
pub fn rule(builder: &mut Builder, statement: &Statement, allows: bool) -> Result<Rule, Diagnostic> {
    let word = &statement.args[0];
    let who = match &**word.text {
        b"all" => Who::All,
        b"unix:" => Who::Unix,
        text => {
            let (network, has_low_bits) = Cidr::parse(text).ok_or_else(|| {
                let error = Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span);
                error.hint("it must be an address, a network such as 192.0.2.0/24, \"unix:\" or \"all\"")
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

/// Returns the decision of the first matching rule, or `None` if no rule matches.
pub fn decide(rules: &[Rule], client: &SocketAddress) -> Option<bool> {
    let address = client.inet().map(|address| unmapped(address.ip(), rules));
    let fits = |rule: &&Rule| match (rule.who, address) {
        (Who::All, _) | (Who::Unix, None) => true,
        (Who::Network(network), Some(address)) => network.contains(address),
        (Who::Unix, Some(_)) | (Who::Network(_), None) => false,
    };
    rules.iter().find(fits).map(|rule| rule.allows)
}

/// Turns an IPv4-mapped IPv6 address into the IPv4 address if there are IPv4 rules.
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

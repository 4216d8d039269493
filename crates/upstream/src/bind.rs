//! Local address of connections to servers: `proxy_bind ADDRESS [transparent] | off`.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_bind>)

use std::net::{IpAddr, SocketAddr};

use bstr::BStr;
use gale_base::log_level::Level;
use gale_config::{Diagnostic, Statement};
use gale_engine::configuration::Builder;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_runtime::SocketAddress;

/// Local address of connections to servers.
pub struct Bind<S: 'static> {
    /// The address, possibly with variables; empty for none.
    address: Template<S>,
    /// `true` if the address need not be one of this machine.
    pub is_transparent: bool,
}

impl<S> Clone for Bind<S> {
    fn clone(&self) -> Bind<S> {
        Bind { address: self.address.clone(), is_transparent: self.is_transparent }
    }
}

impl<S: Subject> Bind<S> {
    /// Parses the directive; `None` for `off`.
    ///
    /// # Errors
    /// Errors with nginx's messages.
    pub fn parse(builder: &mut Builder, statement: &Statement) -> Result<Option<Bind<S>>, Diagnostic> {
        let address = &statement.args[0];
        let is_transparent = match statement.args.get(1) {
            None => false,
            Some(word) if &**word.text == b"transparent" => true,
            Some(word) => {
                return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span));
            }
        };
        if &**address.text == b"off" && statement.args.len() == 1 {
            return Ok(None);
        }
        let template = builder.variables::<S>().template(address)?;
        if template.as_constant().is_some_and(|text| parse_bind(text).is_none()) {
            return Err(Diagnostic::emerg(format!("invalid address \"{}\"", address.text)).at(address.span));
        }
        builder.binds_transparently |= is_transparent;
        Ok(Some(Bind { address: template, is_transparent }))
    }

    /// The address for this subject. An invalid one is logged, and the kernel chooses.
    pub fn evaluate(&self, subject: &S) -> Option<SocketAddress> {
        let mut text = Vec::new();
        self.address.append(subject, &mut text);
        if text.is_empty() {
            return None;
        }
        let address = parse_bind(&text);
        if address.is_none() {
            subject.log(Level::Error, format_args!("invalid local address \"{}\"", BStr::new(&text)));
        }
        address
    }
}

/// Parses an IP address, optionally with a port.
fn parse_bind(text: &[u8]) -> Option<SocketAddress> {
    let text = std::str::from_utf8(text).ok()?;
    let bare = || text.trim_start_matches('[').trim_end_matches(']').parse().ok();
    let inet = text.parse().ok().or_else(|| bare().map(|ip: IpAddr| SocketAddr::new(ip, 0)));
    inet.map(SocketAddress::from)
}

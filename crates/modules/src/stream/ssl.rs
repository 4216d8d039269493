//! ssl: TLS of stream servers. See [`shared::ssl`](crate::shared::ssl).
//!   ssl_alpn PROTOCOL ...;  ssl_handshake_timeout TIME;          stream, server
//!   the directives of `shared::ssl`                              stream, server
//! (<https://nginx.org/en/docs/stream/ngx_stream_ssl_module.html>)

use std::any::Any;

use bstr::BString;
use gale_config::{Diagnostic, One, Statement, Takes, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_stream::module::StreamPart;
use gale_stream::session::Session;
use gale_stream::upstream::settings::ALPN_BYTES_MAX;
use gale_tls::TlsStream;
use gale_tls::settings::TlsSettings;

use super::{PLACE, ROW};
use crate::shared::join;
use crate::shared::ssl::{OverTls, directives, variables};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_ssl",
    directives: &join::<32>(&[&directives(PLACE), OWN]),
    conf: Some(ConfType { merge, ..ConfType::of::<TlsSettings>() }),
    parts: &[&StreamPart { variables: &variables::<Session>(), ..StreamPart::EMPTY }],
};

const OWN: &[Directive] = &[
    Directive {
        name: "ssl_alpn",
        takes: Takes::AtLeast(1),
        about: "Specifies the supported ALPN protocols.",
        store: &One { parse: alpn, slot: slot!(TlsSettings, alpn) },
        ..ROW
    },
    Directive {
        name: "ssl_handshake_timeout",
        default: "60s",
        about: "Sets the timeout for the TLS handshake.",
        store: &One { parse: values::time_ms, slot: slot!(TlsSettings, handshake_timeout) },
        ..ROW
    },
];

fn alpn(statement: &Statement) -> Result<Vec<BString>, Diagnostic> {
    if statement.args.iter().any(|word| word.text.len() > ALPN_BYTES_MAX) {
        return Err(statement.directive_error("protocol too long"));
    }
    Ok(statement.args.iter().map(|word| word.text.clone()).collect())
}

/// Without `ssl_alpn` no protocol is negotiated. Early data stays off.
fn merge(conf: &mut dyn Any, _: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let settings: &mut TlsSettings = conf.downcast_mut().expect("this module's settings");
    if !settings.alpn.is_set() {
        settings.alpn.set(Vec::new(), None);
    }
    // Early data can be replayed, and a session's bytes are not known to be idempotent.
    settings.early_data.set(false, None);
    Ok(())
}

impl OverTls for Session {
    fn tls(&self) -> Option<&TlsStream> {
        Session::tls(self)
    }
}

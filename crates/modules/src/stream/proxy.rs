//! proxy: passes sessions to servers over TCP and UDP.
//!   proxy_pass ADDRESS;                                          server
//!   proxy_connect_timeout TIME;  proxy_timeout TIME;  proxy_buffer_size SIZE;
//!   proxy_upload_rate RATE;  proxy_download_rate RATE;  proxy_half_close on | off;
//!   proxy_protocol on | off | v2;  proxy_requests NUMBER;  proxy_responses NUMBER;
//!   proxy_next_upstream on | off;  proxy_next_upstream_tries NUMBER;  proxy_next_upstream_timeout TIME;
//!   proxy_bind ADDRESS [transparent] | off;  proxy_socket_keepalive on | off;
//!   proxy_socket_rcvbuf SIZE;  proxy_socket_sndbuf SIZE;
//!   proxy_ssl on | off;  proxy_ssl_alpn PROTOCOL ...;  proxy_ssl_…
//!                                                                stream, server
//! (<https://nginx.org/en/docs/stream/ngx_stream_proxy_module.html>)

use std::any::Any;
use std::sync::Arc;

use gale_config::{Contexts, Custom, Diagnostic, One, OneWith, Statement, Takes, Word, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::template::Template;
use gale_engine::virtual_servers::TlsClientDraft;
use gale_stream::configuration::builder::InStream;
use gale_stream::module::StreamPart;
use gale_stream::session::Session;
use gale_stream::session::phases::Serve;
use gale_stream::upstream::pass_on;
use gale_stream::upstream::settings::{ALPN_BYTES_MAX, ProxySettings};
use gale_upstream::{AddressPass, Bind, PassTarget, ProxyVersion, TlsTarget, plain};

use super::{PLACE, ROW};
use crate::shared::tls_client::tls_client_rows;
use crate::shared::{count, join, size_template};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_proxy",
    directives: &join::<{ count(TABLES) }>(TABLES),
    conf: Some(ConfType { merge, ..ConfType::of::<ProxySettings>() }),
    parts: &[&StreamPart {
        content: Some(&Serve {
            applies: |settings: &ProxySettings| settings.pass.is_some(),
            serve: |session, settings| Box::pin(pass_on(session, settings)),
        }),
        ..StreamPart::EMPTY
    }],
};

const TABLES: &[&[Directive]] = &[OWN, tls_client_rows!([slot], Session, ProxySettings, "proxy", PLACE)];

const OWN: &[Directive] = &[
    Directive {
        name: "proxy_pass",
        contexts: Contexts::STREAM_SERVER,
        about: "Sets the address of the server, or the group of servers, to which sessions are passed.",
        store: &Custom(proxy_pass),
        ..ROW
    },
    Directive {
        name: "proxy_connect_timeout",
        default: "60s",
        about: "Sets the timeout for establishing a connection with a server.",
        store: &One { parse: values::time_ms, slot: slot!(ProxySettings, connect_timeout) },
        ..ROW
    },
    Directive {
        name: "proxy_timeout",
        default: "10m",
        about: "Sets the timeout after which a session without traffic in either direction is closed.",
        store: &One { parse: values::time_ms, slot: slot!(ProxySettings, timeout) },
        ..ROW
    },
    Directive {
        name: "proxy_buffer_size",
        default: "16k",
        about: "Sets the size of the buffer for data that passes through memory: over TLS, or with a rate limit.",
        store: &One { parse: values::size, slot: slot!(ProxySettings, buffer_size) },
        ..ROW
    },
    Directive {
        name: "proxy_downstream_buffer",
        about: "Sets proxy_buffer_size by its former name.",
        store: &One { parse: values::size, slot: slot!(ProxySettings, buffer_size) },
        ..ROW
    },
    Directive {
        name: "proxy_upstream_buffer",
        about: "Sets proxy_buffer_size by its former name.",
        store: &One { parse: values::size, slot: slot!(ProxySettings, buffer_size) },
        ..ROW
    },
    Directive {
        name: "proxy_upload_rate",
        about: "Limits the rate of reading from the client in bytes per second; 0 disables the limit.",
        store: &OneWith { parse: size_template, slot: slot!(ProxySettings, upload_rate) },
        ..ROW
    },
    Directive {
        name: "proxy_download_rate",
        about: "Limits the rate of reading from the server in bytes per second; 0 disables the limit.",
        store: &OneWith { parse: size_template, slot: slot!(ProxySettings, download_rate) },
        ..ROW
    },
    Directive {
        name: "proxy_half_close",
        takes: Takes::Flag,
        default: "off",
        about: "Enables or disables closing each direction independently (TCP half-close).",
        store: &One { parse: values::flag, slot: slot!(ProxySettings, half_close) },
        ..ROW
    },
    Directive {
        name: "proxy_next_upstream",
        takes: Takes::Flag,
        default: "on",
        about: "Enables or disables trying the next server of the group if a connection cannot be established.",
        store: &One { parse: values::flag, slot: slot!(ProxySettings, next_upstream) },
        ..ROW
    },
    Directive {
        name: "proxy_next_upstream_tries",
        default: "0",
        about: "Limits the number of servers that are tried; 0 disables the limit.",
        store: &One { parse: values::number, slot: slot!(ProxySettings, next_upstream_tries) },
        ..ROW
    },
    Directive {
        name: "proxy_next_upstream_timeout",
        default: "0",
        about: "Limits the time during which further servers are tried; 0 disables the limit.",
        store: &One { parse: values::time_ms, slot: slot!(ProxySettings, next_upstream_timeout) },
        ..ROW
    },
    Directive {
        name: "proxy_protocol",
        default: "off",
        about: "Sets the version of the PROXY protocol header that is sent to servers: off, on (version 1) or v2.",
        store: &One { parse: ProxyVersion::parse, slot: slot!(ProxySettings, protocol) },
        ..ROW
    },
    Directive {
        name: "proxy_requests",
        default: "0",
        about: "Sets the number of client datagrams after which a new session begins; 0 disables it.",
        store: &One { parse: values::number, slot: slot!(ProxySettings, requests) },
        ..ROW
    },
    Directive {
        name: "proxy_responses",
        about: "Sets the number of datagrams expected in response to a client datagram; without it sessions end \
                only by proxy_timeout.",
        store: &One { parse: values::number, slot: slot!(ProxySettings, responses) },
        ..ROW
    },
    Directive {
        name: "proxy_bind",
        takes: Takes::Between(1, 2),
        default: "off",
        about: "Sets the local address of connections to servers.",
        store: &OneWith { parse: Bind::parse, slot: slot!(ProxySettings, bind) },
        ..ROW
    },
    Directive {
        name: "proxy_bind_dynamic",
        takes: Takes::Flag,
        default: "off",
        about: "No effect: the local address is always resolved when a connection is opened.",
        store: &One { parse: values::flag, slot: slot!(ProxySettings, bind_dynamic) },
        ..ROW
    },
    Directive {
        name: "proxy_socket_keepalive",
        takes: Takes::Flag,
        default: "off",
        about: "Enables or disables TCP keepalive (SO_KEEPALIVE) on connections to servers.",
        store: &One { parse: values::flag, slot: slot!(ProxySettings, socket_keepalive) },
        ..ROW
    },
    Directive {
        name: "proxy_socket_rcvbuf",
        default: "0",
        about: "Sets the receive buffer size (SO_RCVBUF) of connections to servers.",
        store: &One { parse: values::size, slot: slot!(ProxySettings, socket_rcvbuf) },
        ..ROW
    },
    Directive {
        name: "proxy_socket_sndbuf",
        default: "0",
        about: "Sets the send buffer size (SO_SNDBUF) of connections to servers.",
        store: &One { parse: values::size, slot: slot!(ProxySettings, socket_sndbuf) },
        ..ROW
    },
    Directive {
        name: "proxy_ssl",
        takes: Takes::Flag,
        default: "off",
        about: "Enables or disables TLS for connections to servers.",
        store: &One { parse: values::flag, slot: slot!(ProxySettings, ssl) },
        ..ROW
    },
    Directive {
        name: "proxy_ssl_alpn",
        takes: Takes::AtLeast(1),
        about: "Specifies the ALPN protocols that are offered to servers.",
        store: &OneWith { parse: alpn, slot: slot!(ProxySettings, tls_alpn) },
        ..ROW
    },
];

fn proxy_pass(settings: &mut ProxySettings, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let pass = AddressPass::read(builder, statement, settings.pass.is_some(), plain)?;
    let group = match &pass {
        AddressPass::Fixed(TlsTarget { servers: PassTarget::Referred(group), .. }) => Some(*group),
        _ => None,
    };
    let scope = builder.scope;
    builder.stream_mut().note_pass(scope, group);
    settings.pass = Some(pass);
    Ok(())
}

fn alpn(builder: &mut Builder, statement: &Statement) -> Result<Vec<Template<Session>>, Diagnostic> {
    let is_too_long = |word: &Word| !word.text.contains(&b'$') && word.text.len() > ALPN_BYTES_MAX;
    if statement.args.iter().any(is_too_long) {
        return Err(statement.directive_error("protocol too long"));
    }
    let variables = builder.variables::<Session>();
    statement.args.iter().map(|word| variables.template(word)).collect()
}

fn merge(conf: &mut dyn Any, _: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let settings: &mut ProxySettings = conf.downcast_mut().expect("this module's settings");
    if *settings.ssl.get() && settings.pass.is_some() {
        settings.tls_certificate = match (settings.tls.certificate.get_opt(), settings.tls.key.get_opt()) {
            (Some(certificate), Some(key)) if settings.tls.names_certificate() => {
                let variables = builder.variables::<Session>();
                let pair = (variables.template(certificate)?, variables.template(key)?);
                let directory = builder.configuration_directory.clone();
                builder.reach.reads_certificate(&directory, pair.0.known_path(), "proxy_ssl_certificate");
                builder.reach.reads_certificate(&directory, pair.1.known_path(), "proxy_ssl_certificate_key");
                Some(pair)
            }
            _ => None,
        };
        let client = Arc::default();
        settings.tls_client = Some(Arc::clone(&client));
        let draft = TlsClientDraft { settings: settings.tls.clone(), prefix: "proxy", client };
        builder.stream_mut().tls_clients.push(draft);
    }
    Ok(())
}

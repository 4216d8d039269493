//! ssl_preread: fields of the ClientHello, read without terminating TLS.
//!   ssl_preread on | off;                                        stream, server
//!   $ssl_preread_protocol, $ssl_preread_server_name, $ssl_preread_alpn_protocols
//! (<https://nginx.org/en/docs/stream/ngx_stream_ssl_preread_module.html>)
//!
//! The ClientHello may span several segments and records. Other bytes pass unchanged: rejecting them is left to the
//! server.

use gale_config::{One, Setting, Takes, slot, values};
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::Variable;
use gale_protocol::client_hello::{self, Status, host_of};
use gale_stream::module::StreamPart;
use gale_stream::session::Session;
use gale_stream::session::phases::{Decide, Flow, Phase};

use super::ROW;
use crate::shared::append::{append, append_joined};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_ssl_preread",
    directives: &[Directive {
        name: "ssl_preread",
        takes: Takes::Flag,
        default: "off",
        about: "Enables or disables extracting information from the ClientHello message in the preread phase.",
        store: &One { parse: values::flag, slot: slot!(Conf, is_on) },
        ..ROW
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&StreamPart {
        variables: &[
            Variable::named("ssl_preread_protocol", |session: &Session, _, out| {
                told(session).is_some_and(|told| append(out, version_name(told.version)))
            }),
            Variable::named("ssl_preread_server_name", |session: &Session, _, out| {
                told(session).is_some_and(|told| append(out, &told.server_name))
            }),
            Variable::named("ssl_preread_alpn_protocols", |session: &Session, _, out| {
                let Some(told) = told(session) else { return false };
                append_joined(out, told.alpn.iter().map(|name| &**name), b",");
                true
            }),
        ],
        handlers: &[(Phase::Preread, &Decide { applies: |conf: &Conf| *conf.is_on.get(), run })],
        ..StreamPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    is_on: Setting<bool>,
}

/// Fields of the ClientHello; a note of the session.
#[derive(Default)]
struct Told {
    version: u16,
    server_name: Vec<u8>,
    alpn: Vec<Vec<u8>>,
}

fn told(session: &Session) -> Option<&Told> {
    session.notes.get()
}

fn run(session: &mut Session, _: &Conf) -> Flow {
    if session.transport().is_none() {
        return Flow::Next;
    }
    let told = match client_hello::parse(session.input.readable()) {
        Status::NeedMore => return Flow::NeedMore,
        Status::Malformed => match *session.input.readable() {
            // A client of SSL version 2 names the version that it prefers.
            [first, _, 1, major @ (0 | 3), minor, ..] if first & 0x80 != 0 => {
                Told { version: u16::from_be_bytes([major, minor]), ..Told::default() }
            }
            [first, ..] if first & 0x80 != 0 && session.input.len() < 5 => return Flow::NeedMore,
            _ => return Flow::Next,
        },
        Status::Complete(hello) => Told {
            version: hello.version(),
            server_name: hello.server_name().map(<[u8]>::to_vec).unwrap_or_default(),
            alpn: hello.alpn_protocols().map(<[u8]>::to_vec).collect(),
        },
    };
    let name = host_of(&told.server_name);
    session.notes.put(told);
    if !name.is_empty() {
        session.choose_server(&name);
    }
    Flow::PhaseDone
}

/// Returns OpenSSL's name of a version.
fn version_name(version: u16) -> &'static [u8] {
    match version {
        0x0002 => b"SSLv2",
        0x0300 => b"SSLv3",
        0x0301 => b"TLSv1",
        0x0302 => b"TLSv1.1",
        0x0303 => b"TLSv1.2",
        0x0304 => b"TLSv1.3",
        _ => b"",
    }
}

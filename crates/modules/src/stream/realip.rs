//! realip: the client address that a trusted proxy sends. See [`shared::realip`](crate::shared::realip).
//!   set_real_ip_from ADDRESS | CIDR | HOST | unix:;              stream, server
//!   $realip_remote_addr, $realip_remote_port
//! (<https://nginx.org/en/docs/stream/ngx_stream_realip_module.html>)
//!
//! The address comes from the PROXY protocol (`listen … proxy_protocol`).

use gale_config::{ManyWith, Setting, slot};
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::subject::Subject;
use gale_runtime::SocketAddress;
use gale_stream::module::StreamPart;
use gale_stream::session::Session;
use gale_stream::session::phases::{Decide, Flow, Phase};

use super::ROW;
use crate::shared::realip::{Trusted, proxied_client, trusted, variables};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_realip",
    directives: &[Directive {
        name: "set_real_ip_from",
        about: "Defines trusted addresses that are known to send correct replacement addresses.",
        store: &ManyWith { parse: trusted, slot: slot!(Conf, from) },
        ..ROW
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&StreamPart {
        variables: &variables::<Session>(),
        handlers: &[(Phase::PostAccept, &Decide { applies: |conf: &Conf| !conf.from.get().is_empty(), run })],
        ..StreamPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    from: Setting<Vec<Trusted>>,
}

fn run(session: &mut Session, conf: &Conf) -> Flow {
    if let Some(client) = proxied_client(session, conf.from.get()) {
        session.set_remote(SocketAddress::Inet(client));
    }
    Flow::Next
}

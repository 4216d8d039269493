//! core: servers, their addresses, and the settings of all sessions.
//!   stream { ... }                                               main
//!   server { ... }                                               stream
//!   listen ADDRESS[:PORT] [ssl] [udp] [proxy_protocol] [default_server] [OPTION ...];     server
//!   server_name NAME ...;  status_zone ZONE;                     server
//!   preread_buffer_size SIZE;  preread_timeout TIME;  proxy_protocol_timeout TIME;        stream, server
//!   resolver ADDRESS ...;  resolver_timeout TIME;  tcp_nodelay on | off;  error_log ...;  stream, server
//! (<https://nginx.org/en/docs/stream/ngx_stream_core_module.html>)

use std::any::Any;
use std::sync::Arc;

use gale_config::{Body, Contexts, Custom, Diagnostic, ManyWith, One, OneWith, Statement, Takes, slot, values};
use gale_engine::configuration::{Builder, MainSettings, parse_resolver};
use gale_engine::module::{ConfType, Directive, Module};
use gale_stream::configuration::CoreSettings;
use gale_stream::configuration::builder;
use gale_stream::module::StreamPart;

use super::ROW;
use super::variables::VARIABLES;
use crate::shared::figures;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_core",
    directives: &[
        Directive {
            name: "stream",
            contexts: Contexts::MAIN,
            takes: Takes::Exactly(0),
            body: Body::Block,
            about: "Provides the context for stream (TCP and UDP) server directives.",
            store: &Custom(|_: &mut (), builder, statement| builder::stream_block(builder, statement)),
            ..ROW
        },
        Directive {
            name: "server",
            contexts: Contexts::STREAM,
            takes: Takes::Exactly(0),
            body: Body::Block,
            about: "Sets configuration for a server.",
            store: &Custom(|_: &mut (), builder, statement| builder::server_block(builder, statement)),
            ..ROW
        },
        Directive {
            name: "listen",
            contexts: Contexts::STREAM_SERVER,
            takes: Takes::AtLeast(1),
            about: "Sets the address and port, or the UNIX-domain socket, on which the server accepts connections or, \
                    with udp, datagrams.",
            store: &Custom(|_: &mut (), builder, statement| builder::listen(builder, statement)),
            ..ROW
        },
        Directive {
            name: "server_name",
            contexts: Contexts::STREAM_SERVER,
            takes: Takes::AtLeast(1),
            about: "Sets the names of a virtual server, which clients select by SNI.",
            store: &Custom(|_: &mut (), builder, statement| builder::server_name(builder, statement)),
            ..ROW
        },
        Directive {
            name: "status_zone",
            contexts: Contexts::STREAM_SERVER,
            takes: Takes::Exactly(1),
            about: "Sets the zone that counts the sessions of the server.",
            store: &Custom(|_: &mut (), builder, statement| server_zone(builder, statement)),
            ..ROW
        },
        Directive {
            name: "preread_buffer_size",
            default: "16k",
            about: "Sets the size of the preread buffer.",
            store: &One { parse: values::size, slot: slot!(CoreSettings, preread_buffer_size) },
            ..ROW
        },
        Directive {
            name: "preread_timeout",
            default: "30s",
            about: "Sets the timeout of the preread phase.",
            store: &One { parse: values::time_ms, slot: slot!(CoreSettings, preread_timeout) },
            ..ROW
        },
        Directive {
            name: "proxy_protocol_timeout",
            default: "30s",
            about: "Sets the timeout for reading the PROXY protocol header.",
            store: &One { parse: values::time_ms, slot: slot!(CoreSettings, proxy_protocol_timeout) },
            ..ROW
        },
        Directive {
            name: "tcp_nodelay",
            takes: Takes::Flag,
            default: "on",
            about: "Enables or disables the TCP_NODELAY option on client and server connections.",
            store: &One { parse: values::flag, slot: slot!(CoreSettings, tcp_nodelay) },
            ..ROW
        },
        Directive {
            name: "resolver",
            takes: Takes::AtLeast(1),
            about: "Configures the name servers that resolve names of upstream servers: ADDRESS ... [valid=TIME] \
                    [ipv4=on|off] [ipv6=on|off].",
            store: &OneWith {
                parse: |builder, statement| parse_resolver(builder, statement).map(Arc::new),
                slot: slot!(CoreSettings, resolver),
            },
            ..ROW
        },
        Directive {
            name: "resolver_timeout",
            default: "30s",
            about: "Sets the timeout for name resolution; 0 disables it.",
            store: &One { parse: values::time_ms, slot: slot!(CoreSettings, resolver_timeout) },
            ..ROW
        },
        Directive {
            name: "error_log",
            takes: Takes::AtLeast(1),
            about: "Sets the destination, minimum level and format of the error log; may be repeated. Default: as in \
                    the main context.",
            store: &ManyWith { parse: crate::core::error_log, slot: slot!(CoreSettings, error_log) },
            ..ROW
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<CoreSettings>() }),
    parts: &[&StreamPart { variables: VARIABLES, ..StreamPart::EMPTY }],
};

/// Parses `status_zone ZONE`.
fn server_zone(builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let zone = builder.figures(figures::STREAM_SERVERS, &statement.args[0].text);
    if builder::set_server_zone(builder, zone) { Ok(()) } else { Err(statement.directive_error("is duplicate")) }
}

/// Sets the default of `error_log`, which is not a text: the logs of the main context.
fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let core: &mut CoreSettings = conf.downcast_mut().expect("the core module's settings");
    if parent.is_none() && core.error_log.get().is_empty() {
        let main = builder.main_conf::<MainSettings>().map(|main| main.error_log.get().clone());
        core.error_log.set(main.unwrap_or_default(), None);
    }
    Ok(())
}

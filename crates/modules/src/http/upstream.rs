//! upstream: groups of servers that requests are passed to. See [`shared::upstream`](crate::shared::upstream).
//!   upstream NAME { ... }                                        http
//!   the directives of `shared::upstream`, sticky, ntlm           upstream
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html>)

use gale_config::Contexts;
use gale_engine::module::Module;
use gale_http::module::HttpPart;
use gale_http::request::Request;

use crate::http::upstream_variables;
use crate::shared::upstream;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_upstream",
    directives: &upstream::directives::<Request>(Contexts::HTTP),
    parts: &[&HttpPart { variables: upstream_variables::VARIABLES, ..HttpPart::EMPTY }],
    ..Module::EMPTY
};

/// The module of `sticky`.
pub static STICKY: Module =
    Module { name: "http_upstream_sticky", directives: &[upstream::sticky_directive::<Request>()], ..Module::EMPTY };

/// The module of `ntlm`.
pub static NTLM: Module =
    Module { name: "http_upstream_ntlm", directives: &[upstream::ntlm_directive::<Request>()], ..Module::EMPTY };

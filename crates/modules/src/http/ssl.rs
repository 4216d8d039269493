//! ssl: TLS of HTTP servers. See [`shared::ssl`](crate::shared::ssl).
//!   the directives of `shared::ssl`, and ssl_early_data on|off;          http, server
//! (<https://nginx.org/en/docs/http/ngx_http_ssl_module.html>)

use gale_config::Contexts;
use gale_engine::module::{ConfType, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_tls::TlsStream;
use gale_tls::settings::TlsSettings;

use crate::shared::join;
use crate::shared::ssl::{OverTls, directives, early_data, variables};

const PLACE: Contexts = Contexts::HTTP.or(Contexts::SERVER);

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_ssl",
    directives: &join::<31>(&[&directives(PLACE), &[early_data(PLACE)]]),
    conf: Some(ConfType::of::<TlsSettings>()),
    parts: &[&HttpPart { variables: &variables::<Request>(), ..HttpPart::EMPTY }],
};

impl OverTls for Request {
    fn tls(&self) -> Option<&TlsStream> {
        self.exchange().tls()
    }
}

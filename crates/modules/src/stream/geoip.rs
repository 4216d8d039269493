//! geoip: variables with the location of a session's client, from address databases. See
//! [`shared::geoip`](crate::shared::geoip).
//!   geoip_country FILE [utf8];  geoip_city FILE [utf8];  geoip_org FILE [utf8];       stream
//! (<https://nginx.org/en/docs/stream/ngx_stream_geoip_module.html>)

use std::net::IpAddr;

use gale_config::Contexts;
use gale_engine::module::{ConfType, Module};
use gale_engine::variables::subject::Subject;
use gale_stream::module::StreamPart;
use gale_stream::session::Session;

use crate::shared::geoip::{self, Databases, Located};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_geoip",
    directives: &geoip::directives::<()>(Contexts::STREAM),
    conf: Some(ConfType::of::<Databases<()>>()),
    parts: &[&StreamPart { variables: &geoip::variables::<Session>(), ..StreamPart::EMPTY }],
};

impl Located for Session {
    type Own = ();

    fn databases(&self) -> Option<&Databases<()>> {
        self.scope().conf_of()
    }

    fn address(&self) -> Option<IpAddr> {
        Some(self.remote().inet()?.ip().to_canonical())
    }
}

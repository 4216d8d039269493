//! TLS to servers: `ssl_…`.

use std::sync::{Arc, OnceLock};

use gale_config::Setting;
use gale_http::request::variables::template::Template;
use gale_tls::TlsClient;
use gale_tls::settings::TlsClientSettings;

use super::SettingsGroup;

/// Settings of protocols that may use TLS.
#[derive(Default)]
pub struct ServerTlsSettings {
    /// The directives, as the engine reads them.
    pub directives: TlsClientSettings,
    /// Name for the server's certificate and SNI; by default the host of the URL.
    pub name: Setting<Template>,
    /// Names of the client certificate and its key, if they contain variables.
    pub certificate: Option<(Template, Template)>,
    /// The client made from `directives`, if connections may use TLS; set once the configuration is complete.
    pub client: Option<Arc<OnceLock<Arc<TlsClient>>>>,
}

impl SettingsGroup for ServerTlsSettings {}

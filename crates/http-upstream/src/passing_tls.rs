//! Settings of TLS for a request that is passed on: names are evaluated for each server.

use std::sync::Arc;

use gale_http::request::Request;
use gale_tls::{NamedFailure, TlsClient};
use gale_upstream::without_port;

use crate::settings::UpstreamSettings;

/// TLS settings of a request that is passed on.
pub struct PassingTls {
    /// Settings of the configuration.
    pub client: Arc<TlsClient>,
    /// Name that the server's certificate must have, if certificates are verified.
    pub name: Box<[u8]>,
    /// Names of the client certificate and its key, if they depend on the request.
    pub certificate: Option<(Vec<u8>, Vec<u8>)>,
}

impl PassingTls {
    /// Creates the settings for servers that the URL calls `host`. The location's own names are evaluated later.
    ///
    /// # Panics
    /// The scope was not prepared for TLS.
    pub fn new(settings: &UpstreamSettings, host: &[u8]) -> PassingTls {
        let client = settings.tls.client.as_ref().and_then(|client| client.get());
        let client = Arc::clone(client.expect("a scope that may use TLS has its settings"));
        PassingTls { client, name: without_port(host).into(), certificate: None }
    }

    /// Evaluates the location's names for the request and the chosen server.
    pub fn evaluate(&mut self, request: &Request, settings: &UpstreamSettings) {
        if let Some(name) = settings.tls.name.get_opt() {
            self.name = without_port(&name.evaluate(request)).into();
        }
        if let Some((own, key)) = &settings.tls.certificate {
            self.certificate = Some((own.evaluate(request), key.evaluate(request)));
        }
    }

    /// The settings for this server. A client certificate that depends on the request is loaded now.
    pub(super) async fn client(&self) -> Result<Arc<TlsClient>, NamedFailure> {
        match &self.certificate {
            Some((certificate, key)) if self.client.needs_certificate() => {
                self.client.with_certificate(certificate, key).await
            }
            _ => Ok(Arc::clone(&self.client)),
        }
    }
}

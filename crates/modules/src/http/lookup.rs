//! Name resolution for services: by the `resolver` of the http block, or else by the system.

use std::net::{IpAddr, ToSocketAddrs};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_engine::configuration::Configuration;
use gale_http::request::configuration::HttpConfiguration;
use gale_resolver::ResolverSettings;
use gale_runtime::default_pool;
use gale_worker::Worker;
use gale_worker::service::{Context, Service};

/// Default timeout of a lookup, without `resolver_timeout`.
const LOOKUP_TIME_MAX: Duration = Duration::from_secs(30);

/// Name servers, and the timeout of a lookup.
pub(crate) type NameServers = (Arc<ResolverSettings>, Duration);

/// Returns the name servers of the http block.
pub(crate) fn name_servers<S: Service>(context: &Context<S>) -> Option<NameServers> {
    let configuration = context.configuration::<Configuration>()?;
    let http: Arc<HttpConfiguration> = configuration.protocol()?;
    let core = &http.scopes.first()?.core;
    Some((core.resolver.get_opt().cloned()?, *core.resolver_timeout.get()))
}

/// Returns the addresses of a host, which is given by name or address.
///
/// # Errors
/// The reason why there are none.
pub(crate) async fn addresses(
    worker: &Rc<Worker>,
    host: &str,
    name_servers: Option<&NameServers>,
) -> Result<Vec<IpAddr>, String> {
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    let found = match name_servers {
        Some((settings, time_max)) => {
            let resolved = worker.resolver(settings).resolve(host.as_bytes(), *time_max).await;
            resolved.map(|resolved| resolved.found).map_err(|error| error.to_string())
        }
        None => addresses_by_system(host).await,
    };
    found.map_err(|why| format!("{host} could not be resolved ({why})"))
}

async fn addresses_by_system(host: &str) -> Result<Vec<IpAddr>, String> {
    let host = host.to_owned();
    let look_up = move || (host.as_str(), 0).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
    let found = gale_runtime::timeout(LOOKUP_TIME_MAX, default_pool().run(look_up)).await;
    let found = found.map_err(|_| "timed out".to_owned())?.map_err(|error| error.to_string())?;
    let mut found: Vec<IpAddr> =
        found.map_err(|error| error.to_string())?.into_iter().map(|address| address.ip()).collect();
    found.dedup();
    Ok(found)
}

//! The source of figures: a function, or a URL of the API or the dashboard.
//!
//! ```text
//!   URL/figures           the dashboard: everything in one response
//!   URL/9/connections …   the API of Gale or of nginx's commercial edition: one request for each path
//! ```

use std::time::Duration;

use serde_json::{Map, Value};

/// Returns the figures as one JSON object whose keys are the paths of the API, or an error message.
pub type Source = Box<dyn FnMut() -> Result<String, String> + Send>;

/// Timeout of a request.
const PATIENCE: Duration = Duration::from_secs(20);

/// Maximum size of a response in bytes: enough for the figures of some 40,000 servers.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Version of the API used.
const VERSION: &str = "9";

/// Paths requested from the API.
const PATHS: &[&str] = &[
    "nginx",
    "processes",
    "connections",
    "ssl",
    "http/requests",
    "http/server_zones",
    "http/location_zones",
    "http/upstreams",
    "http/caches",
    "stream/server_zones",
    "stream/upstreams",
    "gale/loops",
    "gale/pools",
    "gale/devices",
    "gale/memory",
];

/// Interface found at the URL.
#[derive(Clone, Copy)]
enum Kind {
    Dashboard,
    Api,
}

/// Returns a source that reads from a URL: of a location with `api`, with or without a version, or with `dashboard`.
///
/// # Errors
/// If the URL does not begin with `http://`.
pub fn of_url(url: &str) -> Result<Source, String> {
    if !url.starts_with("http://") {
        return Err(format!("\"{url}\" does not begin with \"http://\""));
    }
    let url = url.trim_end_matches('/').to_owned();
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None)
        .build();
    let agent = ureq::Agent::from(config);
    let mut kind = None;
    Ok(Box::new(move || {
        if !matches!(kind, Some(Kind::Api))
            && let Some(text) = get(&agent, &format!("{url}/figures"))?
        {
            kind = Some(Kind::Dashboard);
            return Ok(text);
        }
        let text = of_api(&agent, &url)?;
        kind = Some(Kind::Api);
        Ok(text)
    }))
}

/// Requests all paths from the API. Paths that it does not have are omitted.
fn of_api(agent: &ureq::Agent, url: &str) -> Result<String, String> {
    let has_version = url.rsplit('/').next().is_some_and(|last| last.parse::<u32>().is_ok());
    let base = if has_version { url.to_owned() } else { format!("{url}/{VERSION}") };
    let mut all = Map::new();
    for path in PATHS {
        let Some(text) = get(agent, &format!("{base}/{path}"))? else {
            if all.is_empty() {
                return Err(format!("there is no API at {url}"));
            }
            continue;
        };
        let value: Value = serde_json::from_str(&text).map_err(|error| format!("{base}/{path}: {error}"))?;
        all.insert((*path).to_owned(), value);
    }
    Ok(Value::Object(all).to_string())
}

/// Returns the response body, or `None` for status 404.
fn get(agent: &ureq::Agent, url: &str) -> Result<Option<String>, String> {
    let told = |error: ureq::Error| format!("{url}: {error}");
    let mut response = agent.get(url).call().map_err(told)?;
    match response.status().as_u16() {
        200 => response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string().map(Some).map_err(told),
        404 => {
            // Reads to the end, so that the connection can be reused.
            let _ = response.body_mut().with_config().limit(1 << 20).read_to_vec();
            Ok(None)
        }
        status => Err(format!("{url} answers with {status}")),
    }
}

//! Where figures come from: a function, or a URL of the API or of the dashboard.
//!
//! ```text
//!   URL/figures           the dashboard's: everything at once
//!   URL/9/connections …   the API's, Gale's or that of nginx's commercial edition: one question for each path
//! ```

use std::time::Duration;

use serde_json::{Map, Value};

/// Tells the figures, as one JSON object by the paths of the API; or why there are none.
pub type Source = Box<dyn FnMut() -> Result<String, String> + Send>;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// The most that is read of an answer, in bytes: the figures of some 40,000 servers.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// The version of the API that is asked.
const VERSION: &str = "9";

/// What is asked of the API.
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

/// What answers at the URL.
#[derive(Clone, Copy)]
enum Kind {
    Dashboard,
    Api,
}

/// Figures from a URL: that of a location with `api`, with or without a version, or with `dashboard`.
///
/// # Errors
/// It is none of HTTP.
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

/// All that is wanted of the API; what it does not have is left out.
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

/// What is at a URL; none where nothing is.
fn get(agent: &ureq::Agent, url: &str) -> Result<Option<String>, String> {
    let told = |error: ureq::Error| format!("{url}: {error}");
    let mut response = agent.get(url).call().map_err(told)?;
    match response.status().as_u16() {
        200 => response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string().map(Some).map_err(told),
        404 => {
            // Read to its end, so that the connection can be used again.
            let _ = response.body_mut().with_config().limit(1 << 20).read_to_vec();
            Ok(None)
        }
        status => Err(format!("{url} answers with {status}")),
    }
}

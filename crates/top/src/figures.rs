//! The figures read from a response of the API. A missing part is left empty, as with other servers that have the API.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The figures of a server at one moment.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Figures {
    pub nginx: Option<Program>,
    pub processes: Processes,
    pub connections: Connections,
    pub ssl: Handshakes,
    #[serde(rename = "http/requests")]
    pub requests: Requests,
    #[serde(rename = "http/server_zones")]
    pub http_servers: BTreeMap<String, Zone>,
    #[serde(rename = "http/location_zones")]
    pub http_locations: BTreeMap<String, Zone>,
    #[serde(rename = "stream/server_zones")]
    pub stream_servers: BTreeMap<String, Zone>,
    #[serde(rename = "http/upstreams")]
    pub http_groups: BTreeMap<String, Group>,
    #[serde(rename = "stream/upstreams")]
    pub stream_groups: BTreeMap<String, Group>,
    #[serde(rename = "http/caches")]
    pub caches: BTreeMap<String, Cache>,
    #[serde(rename = "gale/loops")]
    pub loops: Vec<Loop>,
    #[serde(rename = "gale/pools")]
    pub pools: Vec<Pool>,
    #[serde(rename = "gale/devices")]
    pub devices: Vec<Device>,
    #[serde(rename = "gale/memory")]
    pub memory: Memory,
}

impl Figures {
    /// Parses a response.
    ///
    /// # Errors
    /// If it contains no figures.
    pub fn parse(text: &str) -> Result<Figures, String> {
        let figures: Result<Figures, _> = serde_json::from_str(text);
        let figures = figures.map_err(|error| format!("the answer contains no figures: {error}"))?;
        if figures.nginx.is_none() {
            return Err("the answer contains no figures: the version is missing".to_owned());
        }
        Ok(figures)
    }

    /// Process id of the worker process.
    pub fn pid(&self) -> u64 {
        self.nginx.as_ref().map_or(0, |program| program.pid)
    }

    /// Number of stalls of all event loops.
    pub fn stalls(&self) -> u64 {
        self.loops.iter().map(|each| each.stalls).sum()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Program {
    pub version: String,
    pub build: Option<String>,
    pub generation: u64,
    pub pid: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Processes {
    pub respawned: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Connections {
    pub accepted: u64,
    pub active: u64,
    pub idle: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Handshakes {
    pub handshakes: u64,
    pub handshakes_failed: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Requests {
    pub total: u64,
    pub current: u64,
}

/// Figures of a server or location. In stream, requests are sessions.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Zone {
    #[serde(alias = "connections")]
    pub requests: u64,
    pub processing: Option<u64>,
    #[serde(alias = "sessions")]
    pub responses: Responses,
    pub received: u64,
    pub sent: u64,
    pub first_byte_times: Times,
    #[serde(alias = "session_times")]
    pub response_times: Times,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Responses {
    #[serde(rename = "2xx")]
    pub successful: u64,
    #[serde(rename = "3xx")]
    pub redirecting: u64,
    #[serde(rename = "4xx")]
    pub of_client: u64,
    #[serde(rename = "5xx")]
    pub of_server: u64,
}

/// A histogram.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Times {
    pub count: u64,
    /// Number of values up to and including each bound.
    pub buckets: BTreeMap<Bound, u64>,
}

/// An upper bound in milliseconds; `u64::MAX` means no bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Bound(pub u64);

impl TryFrom<String> for Bound {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Bound, Self::Error> {
        if text == "inf" { Ok(Bound(u64::MAX)) } else { text.parse().map(Bound) }
    }
}

impl Times {
    /// Returns the values added since `earlier`, or all values if the counters have been reset in between.
    pub fn since(&self, earlier: &Times) -> Times {
        if earlier.count > self.count {
            return self.clone();
        }
        let before = |bound: &Bound| earlier.buckets.get(bound).copied().unwrap_or_default();
        let buckets = self.buckets.iter().map(|(bound, count)| (*bound, count.saturating_sub(before(bound))));
        Times { count: self.count - earlier.count, buckets: buckets.collect() }
    }

    /// Adds the values of another histogram.
    pub fn add(&mut self, other: &Times) {
        self.count = self.count.saturating_add(other.count);
        for (bound, count) in &other.buckets {
            let sum = self.buckets.entry(*bound).or_default();
            *sum = sum.saturating_add(*count);
        }
    }

    /// Returns the smallest bound that this share of the times does not exceed, or `None` if there are no times.
    pub fn quantile(&self, part: f64) -> Option<Bound> {
        let wanted = self.count as f64 * part;
        let found = self.buckets.iter().find(|(_, count)| **count as f64 >= wanted);
        (self.count > 0).then(|| found.map_or(Bound(u64::MAX), |(bound, _)| *bound))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Group {
    pub peers: Vec<Peer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Peer {
    pub id: Option<u64>,
    pub server: String,
    pub backup: bool,
    pub weight: u64,
    pub state: String,
    pub active: u64,
    #[serde(alias = "connections")]
    pub requests: u64,
    pub responses: Responses,
    pub fails: u64,
    pub unavail: u64,
    pub first_byte_times: Times,
    pub response_times: Times,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Cache {
    pub size: u64,
    pub max_size: Option<u64>,
    pub cold: bool,
    pub hit: Use,
    pub stale: Use,
    pub updating: Use,
    pub revalidated: Use,
    pub miss: Use,
    pub expired: Use,
    pub bypass: Use,
}

impl Cache {
    /// Number of responses served from the cache.
    pub fn answered(&self) -> u64 {
        [&self.hit, &self.stale, &self.updating, &self.revalidated].iter().map(|each| each.responses).sum()
    }

    /// Number of all responses.
    pub fn responses(&self) -> u64 {
        self.answered() + [&self.miss, &self.expired, &self.bypass].iter().map(|each| each.responses).sum::<u64>()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Use {
    pub responses: u64,
}

/// Figures of an event loop.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Loop {
    pub worker: u64,
    pub turns: u64,
    /// Busy time in milliseconds.
    pub busy: u64,
    /// Longest turn in microseconds; `turn_times` has the same unit.
    pub longest: u64,
    pub turn_times: Quantiles,
    pub stalls: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Quantiles {
    pub p50: u64,
    pub p99: u64,
}

/// Figures of a storage device.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Device {
    pub device: String,
    pub name: String,
    pub condition: String,
    pub reads: Reads,
    pub tasks: Tasks,
}

/// Reads of file parts that were not in memory.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Reads {
    pub in_flight: u64,
    pub total: u64,
    /// Total time in milliseconds.
    pub time: u64,
}

/// Tasks of thread pools for a device.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Tasks {
    pub running: u64,
    pub waiting: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pool {
    pub name: String,
    pub threads: u64,
    pub threads_max: u64,
    pub running: u64,
    pub waiting: u64,
    pub completed: u64,
    pub refused: u64,
    pub wait_times: Quantiles,
    pub run_times: Quantiles,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Memory {
    pub shared: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_bounds_of_the_values_between() {
        let times = |text: &str| serde_json::from_str::<Times>(text).unwrap();
        let early = times(r#"{"count":4,"sum":1,"buckets":{"1":4,"16":4,"inf":4}}"#);
        let late = times(r#"{"count":104,"sum":1,"buckets":{"1":94,"16":103,"inf":104}}"#);
        let between = late.since(&early);
        assert_eq!(between.quantile(0.5), Some(Bound(1)));
        assert_eq!(between.quantile(0.99), Some(Bound(16)));
        assert_eq!(between.quantile(1.0), Some(Bound(u64::MAX)));
        assert_eq!(Times::default().quantile(0.5), None);
        // The counters were reset.
        assert_eq!(early.since(&late).count, 4);
        let mut sum = early.clone();
        sum.add(&early);
        assert_eq!((sum.count, sum.buckets[&Bound(1)]), (8, 8));
    }
}

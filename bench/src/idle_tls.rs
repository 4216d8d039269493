//! idle-tls: memory per idle TLS connection, with HTTP/1 and HTTP/2, and per stalled stream.
//!
//! User memory is the growth of the PSS of all processes of the server, after a warm-up with such connections.

use std::net::SocketAddr;

use serde::Serialize;

use crate::Measured;
use crate::case::in_turn;
use crate::certificate::Certificate;
use crate::client::idle_tls::{Asked, IdleTls};
use crate::memory::Memory;
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Program, Setting};

const WARM_UP_CONNECTIONS: usize = 50;
/// Connections with stalled streams, and the streams on each.
const STALLED_CONNECTIONS: usize = 100;
const STALLED_STREAMS: u32 = 100;

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    rounds: Vec<Readings>,
}

/// KiB of user memory: at once, and after some idle seconds.
#[derive(Clone, Debug, Serialize)]
struct Readings {
    http1: [f64; 2],
    http2: [f64; 2],
    stalled_stream: [f64; 2],
}

/// Measures nginx, h2o, haproxy, and Gale with each driver.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale", "h2o", "haproxy"]))?;
    let certificate = Certificate::make(&["localhost".to_owned()])?;
    let rounds = in_turn(options.idle_rounds, &programs, |program, round| {
        let one = |asked| measure_one(options, program, &certificate, asked);
        let readings = Readings {
            http1: one(Asked::Http1)?,
            http2: one(Asked::Http2)?,
            stalled_stream: one(Asked::Stalled(STALLED_STREAMS))?,
        };
        eprintln!("idle-tls: {} round {round}: {readings:?}", program.label);
        Ok(readings)
    })?;
    let rows: Vec<Row> =
        programs.iter().zip(rounds).map(|(program, rounds)| Row { server: program.label.clone(), rounds }).collect();
    let spread = |row: &Row, figure: fn(&Readings) -> f64| Spread::of(row.rounds.iter().map(figure)).to_string();
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("HTTP/1", &|row| spread(row, |readings| readings.http1[0])),
            ("later", &|row| spread(row, |readings| readings.http1[1])),
            ("HTTP/2", &|row| spread(row, |readings| readings.http2[0])),
            ("later", &|row| spread(row, |readings| readings.http2[1])),
            ("a stalled stream", &|row| spread(row, |readings| readings.stalled_stream[0])),
            ("later", &|row| spread(row, |readings| readings.stalled_stream[1])),
        ],
    );
    let body = format!(
        "KiB of user memory for each of {} idle connections over TLS 1.3, and for each of {} streams of 64 KiB over \
         {STALLED_CONNECTIONS} connections whose windows hold nothing; later: after {} idle seconds. {} rounds; median \
         (least – greatest).\n\n{table}",
        options.idle_connections,
        STALLED_CONNECTIONS * STALLED_STREAMS as usize,
        options.idle_time.as_secs(),
        options.idle_rounds
    );
    Ok((Document::new("idle-tls", "Memory of connections over TLS", &programs, &body, &rows)?, true))
}

fn measure_one(
    options: &Options,
    program: &Program,
    certificate: &std::sync::Arc<Certificate>,
    asked: Asked,
) -> Result<[f64; 2], String> {
    let (count, units) = match asked {
        Asked::Stalled(streams) => (STALLED_CONNECTIONS, STALLED_CONNECTIONS * streams as usize),
        Asked::Http1 | Asked::Http2 => (options.idle_connections, options.idle_connections),
    };
    let setting = Setting {
        connections_max: count + 1024,
        cores: Some(vec![options.server_core]),
        http: "http2 on;".to_owned(),
        certificate: Some(std::sync::Arc::clone(certificate)),
        ..Setting::default()
    };
    let server = program.start(setting)?;
    let address = server.tls_address.as_deref().and_then(|address| address.parse::<SocketAddr>().ok());
    let address = address.ok_or("no address for TLS")?;
    let fault = |error: String| format!("{}, {asked:?}: {error}", program.label);
    let open = |count: usize| IdleTls::open(address, certificate.chain(), count, asked).map_err(fault);
    drop(open(WARM_UP_CONNECTIONS)?);
    let pss = || Memory::read(&server.root.tree()).pss_kib as f64;
    let before = pss();
    let idle = open(count)?;
    let at_once = (pss() - before) / units as f64;
    std::thread::sleep(options.idle_time);
    let later = (pss() - before) / units as f64;
    drop(idle);
    Ok([at_once, later])
}

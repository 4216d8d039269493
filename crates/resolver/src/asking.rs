//! Queries to name servers: over UDP, over TCP if needed, one server after the other until one answers.
//!
//! ```text
//! server 1 ── UDP: A and AAAA ──► both answered ───────────────► done
//!    │                            truncated, or many forgeries ─► TCP ─► done
//!    │ nothing within 5 s, or unreachable
//!    ▼
//! server 2 … and round again, while anything waits for the result
//! ```
//!
//! Each attempt has its own socket, and so an unpredictable port, and unpredictable query IDs. Datagrams from other
//! senders and those that do not match a question are ignored. A response is final, whatever it says: as in nginx, no
//! other server is asked after a failing one.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_runtime::{Buffer, Datagram, Moment, Output, Stream, sleep_until, timeout};
use smallvec::SmallVec;

use super::message::{Answer, Content, DnsName, Kind, Offence, Question};
use gale_base::log_level::Level;

/// Time after which the next server is asked, as in nginx.
const RESEND_AFTER: Duration = Duration::from_secs(5);

/// Timeout of an exchange over TCP, as in nginx.
const TCP_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest response over UDP, as in nginx. Queries announce at most 512, and servers send no more.
const DATAGRAM_BYTES_MAX: usize = 4096;

/// Size of one receive over TCP.
const RECEIVE_BYTES: usize = 4096;

/// Invalid responses that are accepted on one socket. An attacker thus gets that many guesses of 65,536 IDs, for a port
/// that has to be guessed as well; then TCP decides, which an off-path attacker cannot forge.
const OFFENCES_MAX: u32 = 32;

/// Questions about one name, which are sent together.
pub(super) type Asked = SmallVec<[(Kind, Option<Answer>); 2]>;

/// Receiver of events during a query.
pub(super) trait Report {
    fn report(&self, level: Level, message: &dyn std::fmt::Display, server: SocketAddr);
    /// Counts a server that has not answered in time.
    fn note_silence(&self);
    /// `true` if anything waits for the answer.
    fn is_wanted(&self) -> bool;
}

/// Reason why a server has not answered everything.
enum Silence {
    /// The timeout has elapsed.
    Elapsed,
    /// The server is unreachable.
    Absent,
}

/// Asks the servers in turn, from `first` on, until one has answered all questions. Returns `false` once nothing waits
/// for the answer.
pub(super) async fn ask(
    servers: &[SocketAddr],
    first: usize,
    name: &DnsName,
    asked: &mut Asked,
    report: &impl Report,
) -> bool {
    let mut absent = 0;
    for &server in servers.iter().cycle().skip(first) {
        let deadline = gale_runtime::now() + RESEND_AFTER;
        match ask_server(server, name, asked, deadline, report).await {
            Ok(()) => return true,
            Err(Silence::Elapsed) => {
                report.note_silence();
                absent = 0;
            }
            Err(Silence::Absent) => {
                absent += 1;
                // The next server is asked at once, but a full round takes the whole timeout.
                if absent % servers.len() == 0 {
                    sleep_until(deadline).await;
                }
            }
        }
        if !report.is_wanted() {
            return false;
        }
    }
    false
}

async fn ask_server(
    server: SocketAddr,
    name: &DnsName,
    asked: &mut Asked,
    deadline: Moment,
    report: &impl Report,
) -> Result<(), Silence> {
    let failed = |call: &str, error: &io::Error| {
        let message = format!("{call} failed {} while resolving", OsErrorText(error));
        report.report(Level::Error, &message, server);
        Silence::Absent
    };
    let socket = Datagram::connect(&server.into()).map_err(|error| failed("connect()", &error))?;
    let ids: SmallVec<[u16; 2]> = asked.iter().map(|_| gale_runtime::secret_u64() as u16).collect();
    let question = |index: usize, kind: Kind| Question { id: ids[index], name, kind };
    for (index, (kind, _)) in asked.iter().enumerate().filter(|(_, (_, answer))| answer.is_none()) {
        socket.send(&question(index, *kind).to_bytes()).map_err(|error| failed("send()", &error))?;
    }
    let mut bytes = vec![0; DATAGRAM_BYTES_MAX];
    let mut offences = 0;
    while asked.iter().any(|(_, answer)| answer.is_none()) {
        let left = deadline.since(gale_runtime::now());
        let (length, _) = match timeout(left, socket.recv(&mut bytes)).await {
            Ok(received) => received.map_err(|error| failed("recv()", &error))?,
            Err(_) => return Err(Silence::Elapsed),
        };
        match find_question(asked, &bytes[..length], question) {
            Ok((index, answer)) => asked[index].1 = Some(answer),
            Err(offence) => {
                offences += 1;
                // Further ones are similar, or forged.
                if offences == 1 {
                    report.report(Level::Error, &offence, server);
                }
            }
        }
        let is_forged = offences == OFFENCES_MAX;
        for index in 0..asked.len() {
            let (kind, answer) = &asked[index];
            let is_truncated = answer.as_ref().is_some_and(|answer| answer.content == Content::Truncated);
            if is_truncated || is_forged && answer.is_none() {
                let question = question(index, *kind);
                asked[index].1 = None;
                asked[index].1 = Some(ask_by_tcp(server, question, report).await?);
            }
        }
    }
    Ok(())
}

/// Index of the question that a response answers, and the answer.
fn find_question<'q>(
    asked: &Asked,
    bytes: &[u8],
    question: impl Fn(usize, Kind) -> Question<'q>,
) -> Result<(usize, Answer), Offence> {
    let mut offence = Offence::Short;
    for (index, (kind, answer)) in asked.iter().enumerate() {
        match question(index, *kind).read_answer(bytes, false) {
            // The first answer counts.
            Ok(_) if answer.is_some() => {
                offence = Offence::Unexpected { name: question(index, *kind).name.clone() };
            }
            Ok(answer) => return Ok((index, answer)),
            // A response with the wrong ID answers neither question; one with the right ID belongs to that question.
            Err(other @ Offence::WrongId { .. }) if index == 0 => offence = other,
            Err(Offence::WrongId { .. }) => {}
            Err(other) => offence = other,
        }
    }
    Err(offence)
}

/// Errors were reported already.
async fn ask_by_tcp(server: SocketAddr, question: Question<'_>, report: &impl Report) -> Result<Answer, Silence> {
    let answer = match timeout(TCP_TIMEOUT, converse(server, &question.to_bytes())).await {
        Ok(Ok(bytes)) => question.read_answer(&bytes, true),
        Ok(Err(error)) => {
            let message = format!("TCP connection failed {} while resolving", OsErrorText(&error));
            report.report(Level::Error, &message, server);
            return Err(Silence::Absent);
        }
        Err(_) => return Err(Silence::Elapsed),
    };
    answer.map_err(|offence| {
        report.report(Level::Error, &offence, server);
        Silence::Absent
    })
}

/// Sends a query and receives one response, each with its length before it. (RFC 1035 §4.2.2)
async fn converse(server: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let stream = Stream::connect(&server.into()).await?;
    let mut output = Output::new();
    output.append(&u16::try_from(query.len()).map_err(|_| io::ErrorKind::InvalidInput)?.to_be_bytes())?;
    output.append(query)?;
    stream.send_all(&mut output).await?;
    let (mut received, mut input) = (Vec::new(), Buffer::new());
    loop {
        if stream.recv(&mut input, RECEIVE_BYTES).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        received.extend_from_slice(input.readable());
        input.consume(input.len());
        if let Some((length, rest)) = received.split_first_chunk::<2>() {
            // The response is thus bounded by 65,535 bytes and those received with it.
            let length = usize::from(u16::from_be_bytes(*length));
            if let Some(message) = rest.get(..length) {
                return Ok(message.to_vec());
            }
        }
    }
}

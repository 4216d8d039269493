//! Asking the name servers: over UDP, over TCP where that is wanted, one server after the other until one answers.
//!
//! ```text
//! server 1 ── UDP: A and AAAA ──► both answered ───────────────► done
//!    │                            truncated, or much is forged ─► TCP ─► done
//!    │ nothing within 5 s, or nobody is there
//!    ▼
//! server 2 … and round again, for as long as somebody wants to know
//! ```
//!
//! Each try has a socket of its own, and so a port that nobody can foretell, and numbers that nobody can; what does not
//! come from the server, or is not the answer to a question, is ignored. An answer is final, whatever it says: as in
//! nginx, a server that fails is not made up for by another one.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_runtime::{Buffer, Datagram, Moment, Output, Stream, sleep_until, timeout};
use smallvec::SmallVec;

use super::message::{Answer, Content, DnsName, Kind, Offence, Question};
use gale_base::log_level::Level;

/// How long a server is waited for before the next one is asked, as in nginx.
const RESEND_AFTER: Duration = Duration::from_secs(5);

/// How long a conversation over TCP may take, as in nginx.
const TCP_TIMEOUT: Duration = Duration::from_secs(5);

/// The largest answer over UDP, as in nginx: we announce no more than 512, and servers send no more.
const DATAGRAM_BYTES_MAX: usize = 4096;

/// What is received at once over TCP.
const RECEIVE_BYTES: usize = 4096;

/// So many answers that are none are looked at on one socket. Who guesses has that many of 65,536 numbers for a port
/// that he had to guess, too; then TCP decides, which cannot be forged from afar.
const OFFENCES_MAX: u32 = 32;

/// The questions of one name, which are asked together.
pub(super) type Asked = SmallVec<[(Kind, Option<Answer>); 2]>;

/// What is told while asking.
pub(super) trait Report {
    fn report(&self, level: Level, message: &dyn std::fmt::Display, server: SocketAddr);
    /// A server has not answered in time.
    fn note_silence(&self);
    /// Whether anybody waits for the answer.
    fn is_wanted(&self) -> bool;
}

/// Why a server has not answered everything.
enum Silence {
    /// Its time is over.
    Elapsed,
    /// Nobody is there.
    Absent,
}

/// Asks the servers in turn, `first` first, until one has answered all questions. False when nobody wants to know any
/// more.
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
                // The next one is asked at once, but not round and round.
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
                // The others are of the same kind, or forged.
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

/// Which question is answered, and how.
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
            // An answer with the wrong number is none to either question; with the right one, it is to that.
            Err(other @ Offence::WrongId { .. }) if index == 0 => offence = other,
            Err(Offence::WrongId { .. }) => {}
            Err(other) => offence = other,
        }
    }
    Err(offence)
}

/// Errors: told already.
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

/// Sends a query and receives one message: each has its length before it. (RFC 1035 §4.2.2)
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
            // So there is no more of it than 65,535 bytes, and what was received with them.
            let length = usize::from(u16::from_be_bytes(*length));
            if let Some(message) = rest.get(..length) {
                return Ok(message.to_vec());
            }
        }
    }
}

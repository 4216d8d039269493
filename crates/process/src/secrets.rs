//! Secrets shared by all worker processes of a server and by its later binaries: data encrypted by one of them can be
//! decrypted by the next.
//!
//! Only the master creates and changes secrets; with `master_process off` the process itself does. They are sent over
//! the link and, in an upgrade, in a sealed memfd; they are never in a file or a log. There is a series of secrets for
//! every lifetime in the configuration, so that a secret is dropped as soon as everything made with it has expired.
//!
//! ```text
//!   time ──►   ├── old ──┼── in force ──┼── next ──►
//!                                │         └ known to every process before its time comes: processes never disagree
//!                                └ encrypts; all of them decrypt
//! ```
//!
//! TLS ticket keys (`gale_tls::tickets`) are made of such secrets.

use std::env;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::FdFlags;
use rustix::rand::GetRandomFlags;
use serde::{Deserialize, Serialize};

/// Maximum and minimum time that a secret is in force, in seconds.
const PERIOD_MAX: u64 = 3600;
const PERIOD_MIN: u64 = 60;

/// Maximum number of secrets in a series: those of two days, and the next one. Data with a longer lifetime cannot be
/// decrypted until its end.
const SECRETS_MAX: usize = 50;

/// Maximum number of series. All of them fit into one message on a link.
pub const SERIES_MAX: usize = 8;

/// Environment variable that tells the new binary the descriptor of the secrets.
const VARIABLE: &str = "GALE_SECRETS";

/// Beginning of inherited memory.
const MAGIC: &[u8; 8] = b"GALESCR1";

/// Maximum size of inherited memory in bytes.
const MEMORY_MAX: u64 = 1 << 20;

/// Pause before secrets are created again after the kernel had no random numbers.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// One secret.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret {
    /// Time from which it is in force, in seconds since 1970.
    pub from: u64,
    /// Public identifier of the secret.
    pub name: [u8; 16],
    /// The secret.
    pub key: [u8; 32],
}

impl fmt::Debug for Secret {
    /// Shows the time only.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").field("from", &self.from).finish_non_exhaustive()
    }
}

impl Secret {
    fn random(from: u64) -> io::Result<Secret> {
        let mut bytes = [0; 48];
        let mut filled = 0;
        while filled < bytes.len() {
            // Without blocking: right after boot there may be no random numbers yet.
            filled += rustix::rand::getrandom(&mut bytes[filled..], GetRandomFlags::NONBLOCK)?;
        }
        let (name, key) = bytes.split_at(16);
        Ok(Secret { from, name: name.try_into().expect("sixteen"), key: key.try_into().expect("the rest") })
    }
}

/// Secrets for data with the same lifetime, in the order in which they come into force. The last one is not in force
/// yet.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SecretSeries {
    /// Lifetime of data made with one of them, in seconds.
    pub lifetime: u32,
    /// Oldest first.
    pub secrets: Vec<Secret>,
}

impl SecretSeries {
    /// Renews the series for this time; returns `true` if it has changed.
    fn renew(&mut self, now: u64) -> io::Result<bool> {
        let period = u64::from(self.lifetime).clamp(PERIOD_MIN, PERIOD_MAX);
        let mut is_changed = false;
        if self.secrets.last().is_some_and(|last| last.from > now + period) {
            // The clock was set back.
            self.secrets.iter_mut().for_each(|secret| secret.from = secret.from.min(now));
            is_changed = true;
        }
        while self.secrets.last().is_none_or(|last| last.from <= now) {
            let next = match self.secrets.last() {
                // No secret is in force, so the new one is at once; the next one follows.
                None => now,
                Some(last) if last.from + period <= now && last.from < now => now,
                Some(last) => last.from + period,
            };
            self.secrets.push(Secret::random(next)?);
            is_changed = true;
        }
        // A secret encrypts until the next one is in force.
        let is_over = |next: &Secret| next.from + u64::from(self.lifetime) < now;
        let over = self.secrets.iter().skip(1).take_while(|next| is_over(next)).count();
        let over = over.max(self.secrets.len().saturating_sub(SECRETS_MAX));
        self.secrets.drain(..over);
        Ok(is_changed || over > 0)
    }
}

/// Creates and renews the secrets.
#[derive(Default)]
pub(super) struct SecretKeeper {
    series: Vec<SecretSeries>,
    /// Time of the next change.
    next: Option<Instant>,
}

impl SecretKeeper {
    /// Returns a keeper with the secrets of the previous binary; errors in those are reported to `complain`.
    pub fn inherited(complain: impl Fn(&str)) -> SecretKeeper {
        let Some(value) = env::var_os(VARIABLE) else { return SecretKeeper::default() };
        let number = value.to_str().and_then(|text| text.parse().ok()).filter(|&number: &RawFd| number > 2);
        match number.ok_or(io::ErrorKind::InvalidInput.into()).and_then(claim).and_then(|memory| read(&memory)) {
            Ok(series) => SecretKeeper { series, next: None },
            Err(error) => {
                complain(&format!("the secrets of the previous binary cannot be used: {error}"));
                SecretKeeper::default()
            }
        }
    }

    /// Renews the secrets for exactly these lifetimes; returns `true` if any has changed. If the kernel has no random
    /// numbers, it is tried again later.
    pub fn renew(&mut self, lifetimes: &[u32]) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        self.renew_at(now.as_secs(), lifetimes)
    }

    fn renew_at(&mut self, now: u64, lifetimes: &[u32]) -> bool {
        let before = self.series.len();
        self.series.retain(|series| lifetimes.contains(&series.lifetime));
        let mut is_changed = self.series.len() != before;
        for &lifetime in lifetimes {
            if !self.series.iter().any(|series| series.lifetime == lifetime) {
                self.series.push(SecretSeries { lifetime, secrets: Vec::new() });
            }
        }
        self.series.sort_by_key(|series| series.lifetime);
        let mut pause = None::<Duration>;
        for series in &mut self.series {
            let left = match series.renew(now) {
                Ok(has_changed) => {
                    is_changed |= has_changed;
                    Duration::from_secs(series.secrets.last().map_or(0, |last| last.from - now))
                }
                Err(_) => RETRY_PAUSE,
            };
            pause = Some(pause.map_or(left, |pause| pause.min(left)));
        }
        self.next = pause.map(|pause| Instant::now() + pause);
        is_changed
    }

    /// Time of the next call of [`SecretKeeper::renew`].
    pub fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Returns the secrets, the shortest lifetime first.
    pub fn series(&self) -> &[SecretSeries] {
        &self.series
    }

    /// Returns the secrets in sealed memory for the new binary; `None` if there are none.
    pub fn to_memory(&self) -> io::Result<Option<OwnedFd>> {
        if self.series.is_empty() {
            return Ok(None);
        }
        let memory = rustix::fs::memfd_create("gale secrets", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let mut file = File::from(memory);
        file.write_all(MAGIC)?;
        file.write_all(&serde_json::to_vec(&self.series)?)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
        Ok(Some(file.into()))
    }

    /// Returns the environment variable for the new binary.
    pub fn variable(memory: &OwnedFd) -> (&'static str, String) {
        (VARIABLE, memory.as_raw_fd().to_string())
    }
}

/// Takes over the descriptor with this number.
fn claim(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: only borrowed for a call that fails with EBADF if it is not open.
    let probe = unsafe { BorrowedFd::borrow_raw(number) };
    // Fails for anything but a memfd, so that a wrong number takes no other file or socket.
    rustix::fs::fcntl_get_seals(probe)?;
    // SAFETY: it has been open since the process started, which has made no memfd yet: nothing in it owns the number.
    let memory = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&memory, FdFlags::CLOEXEC)?;
    Ok(memory)
}

fn read(memory: &OwnedFd) -> io::Result<Vec<SecretSeries>> {
    let file = File::from(memory.try_clone()?);
    let length = file.metadata()?.len();
    if length > MEMORY_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0)?;
    let json = bytes.strip_prefix(MAGIC).ok_or(io::ErrorKind::InvalidData)?;
    let mut series: Vec<SecretSeries> = serde_json::from_slice(json)?;
    series.truncate(SERIES_MAX);
    for each in &mut series {
        // Memory from another version: order and number of secrets, which the code relies on, are enforced here.
        each.secrets.sort_by_key(|secret| secret.from);
        let surplus = each.secrets.len().saturating_sub(SECRETS_MAX);
        each.secrets.drain(..surplus);
    }
    Ok(series)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn froms(keeper: &SecretKeeper) -> Vec<u64> {
        keeper.series[0].secrets.iter().map(|secret| secret.from - NOW).collect()
    }

    #[test]
    fn the_next_secret_is_there_a_period_ahead_and_old_ones_are_forgotten() {
        let mut keeper = SecretKeeper::default();
        assert!(keeper.renew_at(NOW, &[300]));
        assert_eq!(froms(&keeper), [0, 300]);
        assert!(!keeper.renew_at(NOW + 299, &[300]));
        assert!(keeper.renew_at(NOW + 300, &[300]));
        assert_eq!(froms(&keeper), [0, 300, 600]);
        // Data that the first secret encrypted last expires at 600.
        assert!(keeper.renew_at(NOW + 600, &[300]));
        assert_eq!(froms(&keeper), [0, 300, 600, 900]);
        assert!(keeper.renew_at(NOW + 900, &[300]));
        assert_eq!(froms(&keeper), [300, 600, 900, 1200]);
    }

    #[test]
    fn long_lifetimes_have_a_secret_an_hour_and_no_more_than_fit() {
        let mut keeper = SecretKeeper::default();
        keeper.renew_at(NOW, &[u32::MAX]);
        for hour in 1..200 {
            keeper.renew_at(NOW + hour * 3600, &[u32::MAX]);
        }
        assert_eq!(keeper.series[0].secrets.len(), SECRETS_MAX);
        assert_eq!(froms(&keeper)[SECRETS_MAX - 1], 200 * 3600);
        let lifetimes: Vec<u32> = (0..SERIES_MAX as u32).map(|number| u32::MAX - number).collect();
        for hour in 0..200 {
            keeper.renew_at(NOW + hour * 3600, &lifetimes);
        }
        let message = crate::link::Message::Secrets { series: keeper.series().to_vec() };
        assert!(serde_json::to_vec(&message).unwrap().len() <= crate::link::PACKET_BYTES_MAX);
    }

    #[test]
    fn a_clock_that_leaps_leaves_a_secret_in_force_and_a_next_one() {
        let mut keeper = SecretKeeper::default();
        keeper.renew_at(NOW, &[300]);
        keeper.renew_at(NOW + 100_000, &[300]);
        let is_sound = |keeper: &SecretKeeper, now: u64| {
            let secrets = &keeper.series[0].secrets;
            let in_force = secrets.iter().filter(|secret| secret.from <= now).count();
            in_force >= 1 && secrets.len() == in_force + 1 && secrets[in_force].from <= now + 300
        };
        assert!(is_sound(&keeper, NOW + 100_000), "{:?}", keeper.series);
        keeper.renew_at(NOW + 50_000, &[300]);
        assert!(is_sound(&keeper, NOW + 50_000), "{:?}", keeper.series);
    }

    #[test]
    fn lifetimes_come_and_go() {
        let mut keeper = SecretKeeper::default();
        keeper.renew_at(NOW, &[300]);
        let first = keeper.series[0].clone();
        assert!(keeper.renew_at(NOW, &[300, 60]));
        assert_eq!(keeper.series.iter().map(|series| series.lifetime).collect::<Vec<_>>(), [60, 300]);
        assert!(keeper.series[1] == first);
        assert!(keeper.renew_at(NOW, &[60]) && keeper.series.len() == 1);
        assert!(keeper.renew_at(NOW, &[]) && keeper.next().is_none());
        assert!(keeper.to_memory().unwrap().is_none());
    }

    #[test]
    fn secrets_survive_the_way_through_memory_and_damaged_memory_is_refused() {
        let mut keeper = SecretKeeper::default();
        keeper.renew_at(NOW, &[300, 900]);
        let memory = keeper.to_memory().unwrap().unwrap();
        assert!(read(&memory).unwrap() == keeper.series);
        for bytes in [&b""[..], b"GALESCR1", b"GALESCR1[{}]", b"GALESCR2[]"] {
            let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
            File::from(memory.try_clone().unwrap()).write_all(bytes).unwrap();
            assert!(read(&memory).is_err());
        }
        assert!(!format!("{:?}", keeper.series).contains("key"));
    }
}

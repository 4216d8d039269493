//! power-cut: the disk of a cache as it was at some moment. Its image is copied while the server stores, and a server
//! starts with each copy as after a power cut.
//!
//! The file system is mounted so that a cut does the most harm that ext4 allows: data may come after the names that
//! lead to them (`data=writeback`, `noauto_da_alloc`).

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Experiment;
use super::exchange::{ask, get};
use super::isolation::Need;
use super::origin::{Origin, content};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, each_in_threads, text};
use crate::servers::Setting;
use crate::thread_pools::data_set::Random;

pub const EXPERIMENT: Experiment = Experiment {
    name: "power-cut",
    does: "The image of a cache's disk is copied at six moments while responses are stored; each copy is checked, \
           mounted, and given to a server that starts with it.",
    holds: "Each response that was asked for before the cut is right, from the cache or from the backend.",
    needs: &[Need::LoopDevice],
    not_on_nginx: None,
    run,
};

const IMAGE_BYTES: u64 = 96 << 20;
const CUTS: usize = 6;
const CLIENTS: usize = 4;
const LIMIT: Duration = Duration::from_secs(20);

fn run(trial: &Trial) -> Result<Outcome, String> {
    let folder = trial.folder("power-cut")?;
    let image = folder.join("image");
    fs::File::create(&image).and_then(|file| file.set_len(IMAGE_BYTES)).map_err(|error| error.to_string())?;
    command("mkfs.ext4", &["-q", "-F", &text(&image)])?;
    let disk = mount(&image, &folder.join("disk"))?;
    let origin = Origin::plain()?;
    let watched = trial.start(setting(&disk.0, &origin))?;
    let tally = Tally::default();
    let (asked, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let cuts = std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    ask_for(watched.address(), asked.fetch_add(1, Ordering::Relaxed), &tally);
                    // Slower than the disk, so that the cuts fall into writes of all ages.
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
        }
        let cuts = cut(&image, &folder, &asked);
        is_over.store(true, Ordering::Relaxed);
        cuts
    })?;
    let mut outcome = watched.finish(&tally);
    drop(disk);
    let (after, asked_before) = (Tally::default(), origin.asked());
    for (number, asked) in cuts.iter().enumerate() {
        start_with(trial, &folder.join(format!("cut{number}")), *asked, &origin, &after)?;
    }
    let after = after.outcome();
    let found = after.requests.saturating_sub(origin.asked() - asked_before);
    outcome.requests += after.requests;
    outcome.lost += after.lost;
    outcome.wrong += after.wrong;
    outcome.longest_ms = outcome.longest_ms.max(after.longest_ms);
    outcome.notes.extend(after.notes);
    outcome.notes.push(format!("{found} of {} responses came from the caches after the cuts", after.requests));
    Ok(outcome)
}

/// Copies the image again and again; how many requests had been begun by then.
fn cut(image: &Path, folder: &Path, asked: &AtomicUsize) -> Result<Vec<usize>, String> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    (0..CUTS)
        .map(|number| {
            std::thread::sleep(Duration::from_millis(700 + random.below(1200) as u64));
            let asked = asked.load(Ordering::Relaxed);
            let copy = folder.join(format!("cut{number}"));
            fs::copy(image, &copy).map_err(|error| format!("{}: {error}", copy.display()))?;
            Ok(asked)
        })
        .collect()
}

fn start_with(trial: &Trial, image: &Path, asked: usize, origin: &Origin, tally: &Tally) -> Result<(), String> {
    // As a system does when it starts; 1 and 2 mean that something was mended.
    let checked =
        Command::new("e2fsck").args(["-fy", &text(image)]).output().map_err(|error| format!("e2fsck: {error}"))?;
    if checked.status.code().is_none_or(|code| code > 2) {
        return Err(format!("e2fsck: {}", String::from_utf8_lossy(&checked.stdout)));
    }
    let disk = mount(image, &image.with_extension("disk"))?;
    let server = trial.program.start(setting(&disk.0, origin))?;
    each_in_threads(CLIENTS, asked, |number| ask_for(&server.address, number, tally));
    drop(server);
    Ok(())
}

fn ask_for(address: &str, number: usize, tally: &Tally) {
    let path = format!("/cached/{}/{number}", 5_000 + number * 977 % 60_000);
    let begun = Instant::now();
    tally.must_answer(begun, &path, &ask(address, &get(&path), LIMIT), &content(&path));
}

fn setting(disk: &Path, origin: &Origin) -> Setting {
    Setting {
        http: format!(
            "proxy_cache_path {}/cache levels=1:2 keys_zone=cache:4m max_size=40m use_temp_path=off;",
            text(disk)
        ),
        server: format!(
            "location /cached/ {{ proxy_pass http://{}; proxy_cache cache; proxy_cache_valid 200 1h; }}",
            origin.address
        ),
        ..Setting::default()
    }
}

/// Unmounted when dropped; the loop device goes with it.
struct Mounted(std::path::PathBuf);

fn mount(image: &Path, point: &Path) -> Result<Mounted, String> {
    fs::create_dir_all(point).map_err(|error| format!("{}: {error}", point.display()))?;
    let options = "loop,commit=1,data=writeback,noauto_da_alloc";
    command("mount", &["-t", "ext4", "-o", options, &text(image), &text(point)])?;
    Ok(Mounted(point.to_owned()))
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = command("umount", &[&text(&self.0)]).inspect_err(|error| eprintln!("{error}"));
    }
}

fn command(program: &str, args: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(args).output().map_err(|error| format!("{program}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

-- A ledger of schema version 2 as the code of its time wrote it; content hash: 3a6c2a0f8381cc1ce358cbc5e7574eb0ae2bdead158aa633d933e6cad73b7db8
BEGIN TRANSACTION;
CREATE TABLE blobs (
	hash TEXT NOT NULL, 
	text TEXT, 
	PRIMARY KEY (hash)
);
INSERT INTO "blobs" VALUES('6259c7429ac1a7fcd9a92e871185b7c9def7135465ff6e0427e1b4eac3213caa','MECHANISMS = ()

def quantize(session):
    return 0
');
INSERT INTO "blobs" VALUES('90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057','{"events":[{"index":0,"layer":"blocks.0.q","op":"install"}],"layers":{}}');
INSERT INTO "blobs" VALUES('d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2','done
');
INSERT INTO "blobs" VALUES('2b35ed6944dd2e8f7462b14096e8969711280dffe1457a680c885a95127e426c','improve');
INSERT INTO "blobs" VALUES('262121c5372be8af3ae6ff0d3d138d9e6e1249335222c7f0e02535e35073bb0b','edit');
INSERT INTO "blobs" VALUES('3cd29ed1cb93ed5684c8055e66a6722e8496a06fbcc0a77be57d5bec8c88458a','MECHANISMS = ()

def quantize(session):
    return 1
');
INSERT INTO "blobs" VALUES('44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a','{}');
INSERT INTO "blobs" VALUES('2160e0a5b5ea55682ca5ca24978f379b5c95de4b54175124e9a838eff89b4d4a','MECHANISMS = ()

def quantize(session):
    return 9
');
INSERT INTO "blobs" VALUES('27518423b890cd3fa705d78f25995ddde427876f1ccf785a23fdaa157e9aa96e','MECHANISMS = ()

def quantize(session):
    return 2
');
INSERT INTO "blobs" VALUES('e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855','');
INSERT INTO "blobs" VALUES('e5325d9979bb21a0c219c99fc788cd41372c507d47cb5f0e27c69495b2cf9e3f','MECHANISMS = ()

def quantize(session):
    return 100
');
INSERT INTO "blobs" VALUES('67f477d407a4d2c3e627239255423b378479fc4113db7e78d60b2ef85eaaf3e0','MECHANISMS = ()

def quantize(session):
    return 101
');
INSERT INTO "blobs" VALUES('80dd6b47da4cb5fe9350c1c4873a43efc2ec3b62677b6c886eb8e5c7ddad355a','MECHANISMS = ()

def quantize(session):
    return 102
');
INSERT INTO "blobs" VALUES('876a74567b83b2151cc19cbafd599b58cb16c409b3c86cb135741d3c0a4ea52c','MECHANISMS = ()

def quantize(session):
    return 103
');
INSERT INTO "blobs" VALUES('04abe856b3a9c570c4dcba59865bd382254130c8c2963a0c86a840cec9e9451a','MECHANISMS = ()

def quantize(session):
    return 104
');
INSERT INTO "blobs" VALUES('49ce03073e5204e9346ac5be23c33dbacdf7821752471bc092af1fe785f4cf71','MECHANISMS = ()

def quantize(session):
    return 105
');
CREATE TABLE campaign (
	recipe TEXT NOT NULL, 
	seed INTEGER NOT NULL, 
	budget INTEGER NOT NULL, 
	contract TEXT NOT NULL, 
	subject_name TEXT NOT NULL, 
	subject_hash TEXT NOT NULL, 
	corpus_hash TEXT NOT NULL, 
	corpus_protocol TEXT NOT NULL, 
	proposer TEXT NOT NULL, 
	sandbox TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	CHECK (budget >= 0), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "campaign" VALUES('{"budget":{"calls":10},"name":"test"}',7,10,'mxfp4-w4a4/1','nano-llama','5555555555555555555555555555555555555555555555555555555555555555','cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc','512 tokens per sequence, no BOS','catalogue','bubblewrap','camp-9b63a73ed9',1);
CREATE TABLE controls (
	id TEXT NOT NULL, 
	registered_seq INTEGER NOT NULL, 
	observation_id TEXT NOT NULL, 
	round INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	mechanism TEXT NOT NULL, 
	statement TEXT NOT NULL, 
	program_id TEXT, 
	cost INTEGER NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (registered_seq), 
	FOREIGN KEY(registered_seq) REFERENCES events (seq), 
	FOREIGN KEY(observation_id) REFERENCES observations (id), 
	FOREIGN KEY(program_id) REFERENCES programs (id)
);
INSERT INTO "controls" VALUES('ctl-915470e160',28,'obs-770049e357',0,'without-rotation','knockout','rotation','',NULL,1,'{}');
CREATE TABLE designs (
	id TEXT NOT NULL, 
	registered_seq INTEGER NOT NULL, 
	observation_id TEXT NOT NULL, 
	round INTEGER NOT NULL, 
	chosen TEXT NOT NULL, 
	unseparated TEXT NOT NULL, 
	cost INTEGER NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (registered_seq), 
	FOREIGN KEY(registered_seq) REFERENCES events (seq), 
	FOREIGN KEY(observation_id) REFERENCES observations (id)
);
INSERT INTO "designs" VALUES('design-fc8e36b7a0',31,'obs-770049e357',0,'["ctl-915470e160"]','[]',1,'{}');
CREATE TABLE environment (
	number INTEGER NOT NULL, 
	pid INTEGER NOT NULL, 
	boot_id TEXT NOT NULL, 
	device TEXT NOT NULL, 
	versions TEXT NOT NULL, 
	details TEXT NOT NULL, 
	at TEXT NOT NULL, 
	PRIMARY KEY (number)
);
CREATE TABLE error_maps (
	artifact_hash TEXT NOT NULL, 
	rows TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (artifact_hash), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "error_maps" VALUES('ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','[{"joint":0.25,"layer":"blocks.0.q"}]','map-e00ec9c4ee',13);
CREATE TABLE evaluations (
	id TEXT NOT NULL, 
	reserved_seq INTEGER NOT NULL, 
	settled_seq INTEGER, 
	kind TEXT NOT NULL, 
	state TEXT NOT NULL, 
	program_id TEXT, 
	split TEXT NOT NULL, 
	draw INTEGER NOT NULL, 
	seed INTEGER NOT NULL, 
	control_id TEXT, 
	observation_id TEXT, 
	reference_artifact TEXT, 
	turn INTEGER, 
	outcome TEXT, 
	reason TEXT, 
	nll DOUBLE, 
	chunk_nll TEXT, 
	reference_chunk_nll TEXT, 
	tokens_per_chunk INTEGER, 
	contract TEXT, 
	contract_class TEXT, 
	effective_bits DOUBLE, 
	artifact_hash TEXT, 
	evidence_hash TEXT, 
	metered_tokens INTEGER, 
	route TEXT, 
	log_tail_hash TEXT, 
	wall_s DOUBLE, 
	device TEXT, 
	versions TEXT, 
	PRIMARY KEY (id), 
	CHECK (kind IN ('candidate','control','confirmation','setup','final')), 
	CHECK (state IN ('reserved','settled')), 
	CONSTRAINT control_has_its_control CHECK ((kind = 'control') = (control_id IS NOT NULL)), 
	CONSTRAINT program_unless_setup CHECK (kind = 'setup' OR program_id IS NOT NULL), 
	CONSTRAINT settled_has_outcome CHECK ((state = 'settled') = (outcome IS NOT NULL)), 
	CONSTRAINT settled_has_its_event CHECK ((state = 'settled') = (settled_seq IS NOT NULL)), 
	CONSTRAINT only_scored_has_nll CHECK ((nll IS NOT NULL) = (outcome IS NOT NULL AND outcome = 'scored')), 
	CONSTRAINT settled_after_reserved CHECK (settled_seq IS NULL OR settled_seq > reserved_seq), 
	UNIQUE (reserved_seq), 
	FOREIGN KEY(reserved_seq) REFERENCES events (seq), 
	UNIQUE (settled_seq), 
	FOREIGN KEY(settled_seq) REFERENCES events (seq), 
	FOREIGN KEY(program_id) REFERENCES programs (id), 
	FOREIGN KEY(control_id) REFERENCES controls (id), 
	FOREIGN KEY(observation_id) REFERENCES observations (id), 
	FOREIGN KEY(evidence_hash) REFERENCES blobs (hash), 
	FOREIGN KEY(log_tail_hash) REFERENCES blobs (hash)
);
INSERT INTO "evaluations" VALUES('eval-cdf62763c9',3,4,'setup','settled','prog-7fc4bd89e8','search',0,0,NULL,NULL,NULL,NULL,'scored','',3.25,'[3.0,3.5]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-8d5f5e3aaf',5,6,'setup','settled','prog-7fc4bd89e8','search',1,0,NULL,NULL,NULL,NULL,'scored','',3.255,'[3.01,3.5]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-3c4b053c80',7,8,'setup','settled',NULL,'search',0,0,NULL,NULL,NULL,NULL,'scored','',2.05,'[2.0,2.1]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-b1d6edf7cf',10,11,'candidate','settled','prog-7fc4bd89e8','search',0,0,NULL,NULL,NULL,0,'scored','',3.25,'[3.0,3.5]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-a50bd0f700',18,19,'candidate','settled','prog-7fe2bea31c','search',0,0,NULL,NULL,NULL,1,'scored','',2.5,'[2.5,2.5]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.25,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-d0eb2d777b',20,21,'confirmation','settled','prog-7fe2bea31c','confirm',1,0,NULL,NULL,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff',1,'scored','',2.5,'[2.5,2.5]','[3.0,3.5]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.25,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-dd74dbc5ea',33,34,'control','settled','prog-98b8879725','search',0,0,'ctl-915470e160','obs-770049e357',NULL,NULL,'scored','',3.15,'[2.9,3.4]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-fb442513b2',42,43,'candidate','settled','prog-86ce69502e','search',0,0,NULL,NULL,NULL,2,'crashed','ZeroDivisionError',NULL,'[]','[]',0,'',NULL,NULL,NULL,'44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a',0,'','e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855',0.0,'','{}');
INSERT INTO "evaluations" VALUES('eval-49142fe48a',48,49,'candidate','settled','prog-5e90d0587f','search',0,0,NULL,NULL,NULL,100,'scored','',3.25,'[3.0,3.5]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-84bee1ee48',51,52,'candidate','settled','prog-e67463dd90','search',0,0,NULL,NULL,NULL,101,'scored','',3.25,'[3.0,3.5]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-11ca098594',54,55,'candidate','settled','prog-fbf2470ceb','search',0,0,NULL,NULL,NULL,102,'scored','',3.25,'[3.0,3.5]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-96cf572a84',57,58,'candidate','settled','prog-aaddbb53cf','search',0,0,NULL,NULL,NULL,103,'scored','',3.25,'[3.0,3.5]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
INSERT INTO "evaluations" VALUES('eval-eceee81eb7',60,61,'candidate','settled','prog-879d041c3b','search',0,0,NULL,NULL,NULL,104,'scored','',3.25,'[3.0,3.5]','[]',512,'mxfp4-w4a4/1','online',4.25,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','90e4c363d80f52ffc17cb931896739749e14110146f3fa8179acdf7710823057',4096,'reference','d117fa006ba9208500b2930ce69cbde436c647afa917cb7396a9bc9111a46dd2',1.0,'cpu','{"torch":"2.13"}');
CREATE TABLE events (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	kind TEXT NOT NULL, 
	ref TEXT NOT NULL, 
	at TEXT NOT NULL
);
INSERT INTO "events" VALUES(1,'campaign','camp-9b63a73ed9','2026-12-02T01:40:19.571273+00:00');
INSERT INTO "events" VALUES(2,'program','prog-7fc4bd89e8','2026-12-02T01:40:19.670093+00:00');
INSERT INTO "events" VALUES(3,'evaluation_reserved','eval-cdf62763c9','2026-12-02T01:40:19.779726+00:00');
INSERT INTO "events" VALUES(4,'evaluation_settled','eval-cdf62763c9','2026-12-02T01:40:19.845917+00:00');
INSERT INTO "events" VALUES(5,'evaluation_reserved','eval-8d5f5e3aaf','2026-12-02T01:40:19.899008+00:00');
INSERT INTO "events" VALUES(6,'evaluation_settled','eval-8d5f5e3aaf','2026-12-02T01:40:19.935076+00:00');
INSERT INTO "events" VALUES(7,'evaluation_reserved','eval-3c4b053c80','2026-12-02T01:40:19.975966+00:00');
INSERT INTO "events" VALUES(8,'evaluation_settled','eval-3c4b053c80','2026-12-02T01:40:20.033233+00:00');
INSERT INTO "events" VALUES(9,'noise','noise-4e810951a9','2026-12-02T01:40:20.066966+00:00');
INSERT INTO "events" VALUES(10,'evaluation_reserved','eval-b1d6edf7cf','2026-12-02T01:40:20.106391+00:00');
INSERT INTO "events" VALUES(11,'evaluation_settled','eval-b1d6edf7cf','2026-12-02T01:40:20.138130+00:00');
INSERT INTO "events" VALUES(12,'incumbent','inc-96bb619463','2026-12-02T01:40:20.177393+00:00');
INSERT INTO "events" VALUES(13,'error_map','map-e00ec9c4ee','2026-12-02T01:40:20.203321+00:00');
INSERT INTO "events" VALUES(14,'llm_call','llm-b141df72a5','2026-12-02T01:40:20.254446+00:00');
INSERT INTO "events" VALUES(15,'proposal','prop-c43d51c9d9','2026-12-02T01:40:20.304174+00:00');
INSERT INTO "events" VALUES(16,'note','note-ec000699cb','2026-12-02T01:40:20.363490+00:00');
INSERT INTO "events" VALUES(17,'program','prog-7fe2bea31c','2026-12-02T01:40:20.418176+00:00');
INSERT INTO "events" VALUES(18,'evaluation_reserved','eval-a50bd0f700','2026-12-02T01:40:20.461671+00:00');
INSERT INTO "events" VALUES(19,'evaluation_settled','eval-a50bd0f700','2026-12-02T01:40:20.507519+00:00');
INSERT INTO "events" VALUES(20,'evaluation_reserved','eval-d0eb2d777b','2026-12-02T01:40:20.571953+00:00');
INSERT INTO "events" VALUES(21,'evaluation_settled','eval-d0eb2d777b','2026-12-02T01:40:20.630319+00:00');
INSERT INTO "events" VALUES(22,'observation','obs-770049e357','2026-12-02T01:40:20.682601+00:00');
INSERT INTO "events" VALUES(23,'proposal','prop-5634259c2d','2026-12-02T01:40:20.784693+00:00');
INSERT INTO "events" VALUES(24,'screening','screen-2ddebb2a30','2026-12-02T01:40:20.843713+00:00');
INSERT INTO "events" VALUES(25,'incumbent','inc-de41502c32','2026-12-02T01:40:20.918292+00:00');
INSERT INTO "events" VALUES(26,'hypothesis','hyp-aac2b1ae97','2026-12-02T01:40:20.942289+00:00');
INSERT INTO "events" VALUES(27,'hypothesis','hyp-fcc50b48b0','2026-12-02T01:40:20.947821+00:00');
INSERT INTO "events" VALUES(28,'control','ctl-915470e160','2026-12-02T01:40:20.959030+00:00');
INSERT INTO "events" VALUES(29,'prediction','pred-c29af3fe77','2026-12-02T01:40:20.988050+00:00');
INSERT INTO "events" VALUES(30,'prediction','pred-e1d22e3034','2026-12-02T01:40:20.995764+00:00');
INSERT INTO "events" VALUES(31,'design','design-fc8e36b7a0','2026-12-02T01:40:21.032598+00:00');
INSERT INTO "events" VALUES(32,'program','prog-98b8879725','2026-12-02T01:40:21.065781+00:00');
INSERT INTO "events" VALUES(33,'evaluation_reserved','eval-dd74dbc5ea','2026-12-02T01:40:21.111250+00:00');
INSERT INTO "events" VALUES(34,'evaluation_settled','eval-dd74dbc5ea','2026-12-02T01:40:21.145720+00:00');
INSERT INTO "events" VALUES(35,'probe_result','probe-00b376fcc6','2026-12-02T01:40:21.169466+00:00');
INSERT INTO "events" VALUES(36,'verdict','verdict-98f9eff52a','2026-12-02T01:40:21.201636+00:00');
INSERT INTO "events" VALUES(37,'verdict','verdict-108d3529dd','2026-12-02T01:40:21.206750+00:00');
INSERT INTO "events" VALUES(38,'required_edit','edit-322bc0e070','2026-12-02T01:40:21.242363+00:00');
INSERT INTO "events" VALUES(39,'required_edit_state','state-8e698065a9','2026-12-02T01:40:21.262943+00:00');
INSERT INTO "events" VALUES(40,'note','note-f728617d9b','2026-12-02T01:40:21.343824+00:00');
INSERT INTO "events" VALUES(41,'program','prog-86ce69502e','2026-12-02T01:40:21.379903+00:00');
INSERT INTO "events" VALUES(42,'evaluation_reserved','eval-fb442513b2','2026-12-02T01:40:21.413810+00:00');
INSERT INTO "events" VALUES(43,'evaluation_settled','eval-fb442513b2','2026-12-02T01:40:21.424023+00:00');
INSERT INTO "events" VALUES(44,'probe_result','probe-f58a1aa958','2026-12-02T01:40:21.460916+00:00');
INSERT INTO "events" VALUES(45,'required_edit_state','state-5f3bbc4937','2026-12-02T01:40:21.490963+00:00');
INSERT INTO "events" VALUES(46,'note','note-47bae89dfd','2026-12-02T01:40:21.532855+00:00');
INSERT INTO "events" VALUES(47,'program','prog-5e90d0587f','2026-12-02T01:40:21.550699+00:00');
INSERT INTO "events" VALUES(48,'evaluation_reserved','eval-49142fe48a','2026-12-02T01:40:21.587204+00:00');
INSERT INTO "events" VALUES(49,'evaluation_settled','eval-49142fe48a','2026-12-02T01:40:21.627914+00:00');
INSERT INTO "events" VALUES(50,'program','prog-e67463dd90','2026-12-02T01:40:21.670145+00:00');
INSERT INTO "events" VALUES(51,'evaluation_reserved','eval-84bee1ee48','2026-12-02T01:40:21.695834+00:00');
INSERT INTO "events" VALUES(52,'evaluation_settled','eval-84bee1ee48','2026-12-02T01:40:21.738839+00:00');
INSERT INTO "events" VALUES(53,'program','prog-fbf2470ceb','2026-12-02T01:40:21.781221+00:00');
INSERT INTO "events" VALUES(54,'evaluation_reserved','eval-11ca098594','2026-12-02T01:40:21.818658+00:00');
INSERT INTO "events" VALUES(55,'evaluation_settled','eval-11ca098594','2026-12-02T01:40:21.851469+00:00');
INSERT INTO "events" VALUES(56,'program','prog-aaddbb53cf','2026-12-02T01:40:21.882653+00:00');
INSERT INTO "events" VALUES(57,'evaluation_reserved','eval-96cf572a84','2026-12-02T01:40:21.911968+00:00');
INSERT INTO "events" VALUES(58,'evaluation_settled','eval-96cf572a84','2026-12-02T01:40:21.959576+00:00');
INSERT INTO "events" VALUES(59,'program','prog-879d041c3b','2026-12-02T01:40:21.993453+00:00');
INSERT INTO "events" VALUES(60,'evaluation_reserved','eval-eceee81eb7','2026-12-02T01:40:22.012000+00:00');
INSERT INTO "events" VALUES(61,'evaluation_settled','eval-eceee81eb7','2026-12-02T01:40:22.058297+00:00');
INSERT INTO "events" VALUES(62,'program','prog-25a0623781','2026-12-02T01:40:22.097441+00:00');
INSERT INTO "events" VALUES(63,'note','note-ff065d3461','2026-12-02T01:40:22.138681+00:00');
CREATE TABLE hypotheses (
	id TEXT NOT NULL, 
	registered_seq INTEGER NOT NULL, 
	observation_id TEXT NOT NULL, 
	round INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	mechanism TEXT NOT NULL, 
	cause TEXT NOT NULL, 
	statement TEXT NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (registered_seq), 
	FOREIGN KEY(registered_seq) REFERENCES events (seq), 
	FOREIGN KEY(observation_id) REFERENCES observations (id)
);
INSERT INTO "hypotheses" VALUES('hyp-aac2b1ae97',26,'obs-770049e357',0,'spreading','rotation','outlier_spreading','spreads outliers','{}');
INSERT INTO "hypotheses" VALUES('hyp-fcc50b48b0',27,'obs-770049e357',0,'averaging','rotation','error_averaging','averages errors','{}');
CREATE TABLE incumbents (
	turn INTEGER NOT NULL, 
	program_id TEXT NOT NULL, 
	evaluation_id TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(program_id) REFERENCES programs (id), 
	UNIQUE (evaluation_id), 
	FOREIGN KEY(evaluation_id) REFERENCES evaluations (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "incumbents" VALUES(0,'prog-7fc4bd89e8','eval-b1d6edf7cf','the seed','inc-96bb619463',12);
INSERT INTO "incumbents" VALUES(1,'prog-7fe2bea31c','eval-a50bd0f700','beats prog-7fc4bd89e8','inc-de41502c32',25);
CREATE TABLE leases (
	number INTEGER NOT NULL, 
	evaluation_id TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	action TEXT NOT NULL, 
	owner TEXT NOT NULL, 
	pid INTEGER NOT NULL, 
	boot_id TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	at TEXT NOT NULL, 
	PRIMARY KEY (number), 
	CHECK (action IN ('taken','released')), 
	FOREIGN KEY(evaluation_id) REFERENCES evaluations (id)
);
INSERT INTO "leases" VALUES(1,'eval-cdf62763c9',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:19.801583+00:00');
INSERT INTO "leases" VALUES(2,'eval-8d5f5e3aaf',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:19.906363+00:00');
INSERT INTO "leases" VALUES(3,'eval-3c4b053c80',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:19.983627+00:00');
INSERT INTO "leases" VALUES(4,'eval-b1d6edf7cf',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:20.113243+00:00');
INSERT INTO "leases" VALUES(5,'eval-a50bd0f700',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:20.474098+00:00');
INSERT INTO "leases" VALUES(6,'eval-d0eb2d777b',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:20.591096+00:00');
INSERT INTO "leases" VALUES(7,'eval-dd74dbc5ea',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:21.117987+00:00');
INSERT INTO "leases" VALUES(8,'eval-fb442513b2',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:21.415977+00:00');
INSERT INTO "leases" VALUES(9,'eval-49142fe48a',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:21.594965+00:00');
INSERT INTO "leases" VALUES(10,'eval-84bee1ee48',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:21.719590+00:00');
INSERT INTO "leases" VALUES(11,'eval-11ca098594',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:21.822259+00:00');
INSERT INTO "leases" VALUES(12,'eval-96cf572a84',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:21.918735+00:00');
INSERT INTO "leases" VALUES(13,'eval-eceee81eb7',1,'taken','1efac4cf03e343139eeb3a389728fa2a',2133,'53eefc95-b24c-4ea6-b801-5e64b53d94c3','','2026-12-02T01:40:22.019422+00:00');
CREATE TABLE llm_calls (
	purpose TEXT NOT NULL, 
	prompt_hash TEXT NOT NULL, 
	reply_hash TEXT NOT NULL, 
	model TEXT NOT NULL, 
	tokens_in INTEGER, 
	tokens_out INTEGER, 
	cost DOUBLE, 
	body TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (purpose), 
	FOREIGN KEY(prompt_hash) REFERENCES blobs (hash), 
	FOREIGN KEY(reply_hash) REFERENCES blobs (hash), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "llm_calls" VALUES('turn-1/propose/0','2b35ed6944dd2e8f7462b14096e8969711280dffe1457a680c885a95127e426c','262121c5372be8af3ae6ff0d3d138d9e6e1249335222c7f0e02535e35073bb0b','catalogue',1,NULL,NULL,'{}','llm-b141df72a5',14);
CREATE TABLE llm_failures (
	number INTEGER NOT NULL, 
	purpose TEXT NOT NULL, 
	model TEXT NOT NULL, 
	error TEXT NOT NULL, 
	tokens_in INTEGER, 
	tokens_out INTEGER, 
	cost DOUBLE, 
	at TEXT NOT NULL, 
	PRIMARY KEY (number)
);
CREATE TABLE noise (
	program_id TEXT NOT NULL, 
	split TEXT NOT NULL, 
	floor DOUBLE NOT NULL, 
	chunk_variance DOUBLE NOT NULL, 
	draw_variance DOUBLE NOT NULL, 
	num_chunks INTEGER NOT NULL, 
	evaluation_ids TEXT NOT NULL, 
	body TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(program_id) REFERENCES programs (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "noise" VALUES('prog-7fc4bd89e8','search',0.01,0.0001,2.0e-05,2,'["eval-cdf62763c9","eval-8d5f5e3aaf"]','{}','noise-4e810951a9',9);
CREATE TABLE notes (
	turn INTEGER NOT NULL, 
	topic TEXT NOT NULL, 
	text TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "notes" VALUES(1,'budget','9 calls are free','note-ec000699cb',16);
INSERT INTO "notes" VALUES(1,'edits','open: [''edit-322bc0e070'']','note-f728617d9b',40);
INSERT INTO "notes" VALUES(2,'declared','prog-7fe2bea31c is declared the best','note-47bae89dfd',46);
INSERT INTO "notes" VALUES(3,'end','no evaluator call is free: budget 10, used 10, reserved 0','note-ff065d3461',63);
CREATE TABLE observations (
	turn INTEGER NOT NULL, 
	program_id TEXT NOT NULL, 
	parent_id TEXT NOT NULL, 
	search_effect DOUBLE NOT NULL, 
	search_se DOUBLE NOT NULL, 
	confirmed_effect DOUBLE NOT NULL, 
	confirmed_se DOUBLE NOT NULL, 
	confirmation_id TEXT NOT NULL, 
	body TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(program_id) REFERENCES programs (id), 
	FOREIGN KEY(parent_id) REFERENCES programs (id), 
	FOREIGN KEY(confirmation_id) REFERENCES evaluations (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "observations" VALUES(1,'prog-7fe2bea31c','prog-7fc4bd89e8',0.7,0.01,0.75,0.02,'eval-d0eb2d777b','{}','obs-770049e357',22);
CREATE TABLE predictions (
	id TEXT NOT NULL, 
	registered_seq INTEGER NOT NULL, 
	observation_id TEXT NOT NULL, 
	hypothesis_id TEXT NOT NULL, 
	control_id TEXT NOT NULL, 
	low DOUBLE NOT NULL, 
	high DOUBLE NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT low_not_above_high CHECK (low <= high), 
	CONSTRAINT finite CHECK (low > -1e300 AND high < 1e300), 
	UNIQUE (registered_seq), 
	FOREIGN KEY(registered_seq) REFERENCES events (seq), 
	FOREIGN KEY(observation_id) REFERENCES observations (id), 
	FOREIGN KEY(hypothesis_id) REFERENCES hypotheses (id), 
	FOREIGN KEY(control_id) REFERENCES controls (id)
);
INSERT INTO "predictions" VALUES('pred-c29af3fe77',29,'obs-770049e357','hyp-aac2b1ae97','ctl-915470e160',0.0,0.2,'{}');
INSERT INTO "predictions" VALUES('pred-e1d22e3034',30,'obs-770049e357','hyp-fcc50b48b0','ctl-915470e160',0.4,6.00000000000000088817e-01,'{}');
CREATE TABLE probe_results (
	target_id TEXT NOT NULL, 
	program_id TEXT NOT NULL, 
	evaluation_id TEXT, 
	kind TEXT NOT NULL, 
	name TEXT NOT NULL, 
	status TEXT NOT NULL, 
	detail TEXT NOT NULL, 
	provisional BOOLEAN NOT NULL, 
	body TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT paid_has_evaluation CHECK (provisional OR evaluation_id IS NOT NULL), 
	FOREIGN KEY(program_id) REFERENCES programs (id), 
	FOREIGN KEY(evaluation_id) REFERENCES evaluations (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "probe_results" VALUES('ctl-915470e160','prog-98b8879725','eval-dd74dbc5ea','artifact','','executed','',0,'{}','probe-00b376fcc6',35);
INSERT INTO "probe_results" VALUES('edit-322bc0e070','prog-86ce69502e','eval-fb442513b2','call','','executed','',0,'{}','probe-f58a1aa958',44);
CREATE TABLE programs (
	source_hash TEXT NOT NULL, 
	origin TEXT NOT NULL, 
	title TEXT NOT NULL, 
	parent_id TEXT, 
	mechanisms TEXT NOT NULL, 
	ast_hash TEXT NOT NULL, 
	normalized_ast_hash TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	CHECK (origin IN ('seed','candidate','control','knockout')), 
	FOREIGN KEY(source_hash) REFERENCES blobs (hash), 
	FOREIGN KEY(parent_id) REFERENCES programs (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "programs" VALUES('6259c7429ac1a7fcd9a92e871185b7c9def7135465ff6e0427e1b4eac3213caa','seed','program 0',NULL,'[]','a0','n0','prog-7fc4bd89e8',2);
INSERT INTO "programs" VALUES('3cd29ed1cb93ed5684c8055e66a6722e8496a06fbcc0a77be57d5bec8c88458a','candidate','program 1','prog-7fc4bd89e8','[]','a1','n1','prog-7fe2bea31c',17);
INSERT INTO "programs" VALUES('2160e0a5b5ea55682ca5ca24978f379b5c95de4b54175124e9a838eff89b4d4a','control','program 9','prog-7fe2bea31c','[]','a9','n9','prog-98b8879725',32);
INSERT INTO "programs" VALUES('27518423b890cd3fa705d78f25995ddde427876f1ccf785a23fdaa157e9aa96e','candidate','program 2','prog-7fe2bea31c','[]','a2','n2','prog-86ce69502e',41);
INSERT INTO "programs" VALUES('e5325d9979bb21a0c219c99fc788cd41372c507d47cb5f0e27c69495b2cf9e3f','candidate','program 100',NULL,'[]','a100','n100','prog-5e90d0587f',47);
INSERT INTO "programs" VALUES('67f477d407a4d2c3e627239255423b378479fc4113db7e78d60b2ef85eaaf3e0','candidate','program 101',NULL,'[]','a101','n101','prog-e67463dd90',50);
INSERT INTO "programs" VALUES('80dd6b47da4cb5fe9350c1c4873a43efc2ec3b62677b6c886eb8e5c7ddad355a','candidate','program 102',NULL,'[]','a102','n102','prog-fbf2470ceb',53);
INSERT INTO "programs" VALUES('876a74567b83b2151cc19cbafd599b58cb16c409b3c86cb135741d3c0a4ea52c','candidate','program 103',NULL,'[]','a103','n103','prog-aaddbb53cf',56);
INSERT INTO "programs" VALUES('04abe856b3a9c570c4dcba59865bd382254130c8c2963a0c86a840cec9e9451a','candidate','program 104',NULL,'[]','a104','n104','prog-879d041c3b',59);
INSERT INTO "programs" VALUES('49ce03073e5204e9346ac5be23c33dbacdf7821752471bc092af1fe785f4cf71','candidate','program 105',NULL,'[]','a105','n105','prog-25a0623781',62);
CREATE TABLE proposals (
	turn INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	llm_call_id TEXT, 
	program_id TEXT, 
	status TEXT NOT NULL, 
	stage TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	claims TEXT NOT NULL, 
	discharges TEXT NOT NULL, 
	body TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	CHECK (status IN ('accepted','refused')), 
	CONSTRAINT refusal_has_a_reason CHECK ((status = 'refused') = (reason <> '')), 
	FOREIGN KEY(llm_call_id) REFERENCES llm_calls (id), 
	FOREIGN KEY(program_id) REFERENCES programs (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "proposals" VALUES(1,'candidate',0,'llm-b141df72a5',NULL,'refused','edits','no match','[]','[]','{}','prop-c43d51c9d9',15);
INSERT INTO "proposals" VALUES(1,'candidate',1,NULL,'prog-7fe2bea31c','accepted','','','[{"cause":"outlier_spreading","mechanism":"rotation"}]','[]','{}','prop-5634259c2d',23);
CREATE TABLE required_edit_states (
	edit_id TEXT NOT NULL, 
	turn INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	program_id TEXT, 
	body TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(edit_id) REFERENCES required_edits (id), 
	FOREIGN KEY(program_id) REFERENCES programs (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "required_edit_states" VALUES('edit-322bc0e070',1,'open','',NULL,'{}','state-8e698065a9',39);
INSERT INTO "required_edit_states" VALUES('edit-322bc0e070',2,'discharged','executed','prog-86ce69502e','{}','state-5f3bbc4937',45);
CREATE TABLE required_edits (
	observation_id TEXT NOT NULL, 
	hypothesis_id TEXT, 
	turn INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	mechanism TEXT NOT NULL, 
	cause TEXT NOT NULL, 
	text TEXT NOT NULL, 
	blocking BOOLEAN NOT NULL, 
	lineage TEXT NOT NULL, 
	probe TEXT NOT NULL, 
	body TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(observation_id) REFERENCES observations (id), 
	FOREIGN KEY(hypothesis_id) REFERENCES hypotheses (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "required_edits" VALUES('obs-770049e357','hyp-fcc50b48b0',1,'extend','rotation','error_averaging','carry the rotation to the down projections',1,'main','{"kind":"call"}','{}','edit-322bc0e070',38);
CREATE TABLE schema_versions (
	version INTEGER NOT NULL, 
	applied_at TEXT NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "schema_versions" VALUES(2,'2026-12-02T01:40:19.476108+00:00');
CREATE TABLE screenings (
	program_id TEXT NOT NULL, 
	proposal_id TEXT, 
	passed BOOLEAN NOT NULL, 
	smoke_outcome TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	evidence_hash TEXT NOT NULL, 
	checks TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(program_id) REFERENCES programs (id), 
	FOREIGN KEY(proposal_id) REFERENCES proposals (id), 
	FOREIGN KEY(evidence_hash) REFERENCES blobs (hash), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "screenings" VALUES('prog-7fe2bea31c','prop-5634259c2d',1,'scored','','44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a','[]','screen-2ddebb2a30',24);
CREATE TABLE verdicts (
	observation_id TEXT NOT NULL, 
	hypothesis_id TEXT NOT NULL, 
	round INTEGER NOT NULL, 
	status TEXT NOT NULL, 
	rule TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	evidence TEXT NOT NULL, 
	id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(observation_id) REFERENCES observations (id), 
	FOREIGN KEY(hypothesis_id) REFERENCES hypotheses (id), 
	UNIQUE (seq), 
	FOREIGN KEY(seq) REFERENCES events (seq)
);
INSERT INTO "verdicts" VALUES('obs-770049e357','hyp-aac2b1ae97',0,'refuted','verdict/1','by the interval','{}','verdict-98f9eff52a',36);
INSERT INTO "verdicts" VALUES('obs-770049e357','hyp-fcc50b48b0',0,'supported','verdict/1','by the interval','{}','verdict-108d3529dd',37);
CREATE INDEX evaluations_by_control ON evaluations (control_id);
CREATE INDEX evaluations_by_program ON evaluations (program_id);
CREATE INDEX ix_controls_observation_id ON controls (observation_id);
CREATE INDEX ix_programs_ast_hash ON programs (ast_hash);
CREATE INDEX ix_programs_normalized_ast_hash ON programs (normalized_ast_hash);
CREATE INDEX ix_leases_evaluation_id ON leases (evaluation_id);
CREATE INDEX ix_hypotheses_observation_id ON hypotheses (observation_id);
CREATE INDEX ix_designs_observation_id ON designs (observation_id);
CREATE INDEX ix_predictions_control_id ON predictions (control_id);
CREATE INDEX ix_verdicts_observation_id ON verdicts (observation_id);
CREATE INDEX ix_required_edits_observation_id ON required_edits (observation_id);
CREATE INDEX ix_probe_results_target_id ON probe_results (target_id);
CREATE INDEX ix_required_edit_states_edit_id ON required_edit_states (edit_id);
CREATE TRIGGER blobs_no_delete BEFORE DELETE ON blobs BEGIN SELECT RAISE(ABORT, 'ledger: rows of blobs are never deleted'); END;
CREATE TRIGGER blobs_no_update BEFORE UPDATE ON blobs BEGIN SELECT RAISE(ABORT, 'ledger: rows of blobs are never changed'); END;
CREATE TRIGGER blobs_no_replace BEFORE INSERT ON blobs WHEN EXISTS (SELECT 1 FROM blobs WHERE hash = NEW.hash) BEGIN SELECT RAISE(ABORT, 'ledger: rows of blobs are never replaced'); END;
CREATE TRIGGER campaign_no_delete BEFORE DELETE ON campaign BEGIN SELECT RAISE(ABORT, 'ledger: rows of campaign are never deleted'); END;
CREATE TRIGGER campaign_no_update BEFORE UPDATE ON campaign BEGIN SELECT RAISE(ABORT, 'ledger: rows of campaign are never changed'); END;
CREATE TRIGGER campaign_no_replace BEFORE INSERT ON campaign WHEN EXISTS (SELECT 1 FROM campaign WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of campaign are never replaced'); END;
CREATE TRIGGER controls_no_delete BEFORE DELETE ON controls BEGIN SELECT RAISE(ABORT, 'ledger: rows of controls are never deleted'); END;
CREATE TRIGGER controls_no_update BEFORE UPDATE ON controls BEGIN SELECT RAISE(ABORT, 'ledger: rows of controls are never changed'); END;
CREATE TRIGGER controls_no_replace BEFORE INSERT ON controls WHEN EXISTS (SELECT 1 FROM controls WHERE id = NEW.id OR registered_seq = NEW.registered_seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of controls are never replaced'); END;
CREATE TRIGGER designs_no_delete BEFORE DELETE ON designs BEGIN SELECT RAISE(ABORT, 'ledger: rows of designs are never deleted'); END;
CREATE TRIGGER designs_no_update BEFORE UPDATE ON designs BEGIN SELECT RAISE(ABORT, 'ledger: rows of designs are never changed'); END;
CREATE TRIGGER designs_no_replace BEFORE INSERT ON designs WHEN EXISTS (SELECT 1 FROM designs WHERE id = NEW.id OR registered_seq = NEW.registered_seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of designs are never replaced'); END;
CREATE TRIGGER environment_no_delete BEFORE DELETE ON environment BEGIN SELECT RAISE(ABORT, 'ledger: rows of environment are never deleted'); END;
CREATE TRIGGER environment_no_update BEFORE UPDATE ON environment BEGIN SELECT RAISE(ABORT, 'ledger: rows of environment are never changed'); END;
CREATE TRIGGER environment_no_replace BEFORE INSERT ON environment WHEN EXISTS (SELECT 1 FROM environment WHERE number = NEW.number) BEGIN SELECT RAISE(ABORT, 'ledger: rows of environment are never replaced'); END;
CREATE TRIGGER error_maps_no_delete BEFORE DELETE ON error_maps BEGIN SELECT RAISE(ABORT, 'ledger: rows of error_maps are never deleted'); END;
CREATE TRIGGER error_maps_no_update BEFORE UPDATE ON error_maps BEGIN SELECT RAISE(ABORT, 'ledger: rows of error_maps are never changed'); END;
CREATE TRIGGER error_maps_no_replace BEFORE INSERT ON error_maps WHEN EXISTS (SELECT 1 FROM error_maps WHERE artifact_hash = NEW.artifact_hash OR id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of error_maps are never replaced'); END;
CREATE TRIGGER evaluations_no_delete BEFORE DELETE ON evaluations BEGIN SELECT RAISE(ABORT, 'ledger: rows of evaluations are never deleted'); END;
CREATE TRIGGER evaluations_no_replace BEFORE INSERT ON evaluations WHEN EXISTS (SELECT 1 FROM evaluations WHERE id = NEW.id OR reserved_seq = NEW.reserved_seq OR settled_seq = NEW.settled_seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of evaluations are never replaced'); END;
CREATE TRIGGER events_no_delete BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'ledger: rows of events are never deleted'); END;
CREATE TRIGGER events_no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'ledger: rows of events are never changed'); END;
CREATE TRIGGER events_no_replace BEFORE INSERT ON events WHEN EXISTS (SELECT 1 FROM events WHERE seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of events are never replaced'); END;
CREATE TRIGGER hypotheses_no_delete BEFORE DELETE ON hypotheses BEGIN SELECT RAISE(ABORT, 'ledger: rows of hypotheses are never deleted'); END;
CREATE TRIGGER hypotheses_no_update BEFORE UPDATE ON hypotheses BEGIN SELECT RAISE(ABORT, 'ledger: rows of hypotheses are never changed'); END;
CREATE TRIGGER hypotheses_no_replace BEFORE INSERT ON hypotheses WHEN EXISTS (SELECT 1 FROM hypotheses WHERE id = NEW.id OR registered_seq = NEW.registered_seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of hypotheses are never replaced'); END;
CREATE TRIGGER incumbents_no_delete BEFORE DELETE ON incumbents BEGIN SELECT RAISE(ABORT, 'ledger: rows of incumbents are never deleted'); END;
CREATE TRIGGER incumbents_no_update BEFORE UPDATE ON incumbents BEGIN SELECT RAISE(ABORT, 'ledger: rows of incumbents are never changed'); END;
CREATE TRIGGER incumbents_no_replace BEFORE INSERT ON incumbents WHEN EXISTS (SELECT 1 FROM incumbents WHERE evaluation_id = NEW.evaluation_id OR id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of incumbents are never replaced'); END;
CREATE TRIGGER leases_no_delete BEFORE DELETE ON leases BEGIN SELECT RAISE(ABORT, 'ledger: rows of leases are never deleted'); END;
CREATE TRIGGER leases_no_update BEFORE UPDATE ON leases BEGIN SELECT RAISE(ABORT, 'ledger: rows of leases are never changed'); END;
CREATE TRIGGER leases_no_replace BEFORE INSERT ON leases WHEN EXISTS (SELECT 1 FROM leases WHERE number = NEW.number) BEGIN SELECT RAISE(ABORT, 'ledger: rows of leases are never replaced'); END;
CREATE TRIGGER llm_calls_no_delete BEFORE DELETE ON llm_calls BEGIN SELECT RAISE(ABORT, 'ledger: rows of llm_calls are never deleted'); END;
CREATE TRIGGER llm_calls_no_update BEFORE UPDATE ON llm_calls BEGIN SELECT RAISE(ABORT, 'ledger: rows of llm_calls are never changed'); END;
CREATE TRIGGER llm_calls_no_replace BEFORE INSERT ON llm_calls WHEN EXISTS (SELECT 1 FROM llm_calls WHERE purpose = NEW.purpose OR id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of llm_calls are never replaced'); END;
CREATE TRIGGER llm_failures_no_delete BEFORE DELETE ON llm_failures BEGIN SELECT RAISE(ABORT, 'ledger: rows of llm_failures are never deleted'); END;
CREATE TRIGGER llm_failures_no_update BEFORE UPDATE ON llm_failures BEGIN SELECT RAISE(ABORT, 'ledger: rows of llm_failures are never changed'); END;
CREATE TRIGGER llm_failures_no_replace BEFORE INSERT ON llm_failures WHEN EXISTS (SELECT 1 FROM llm_failures WHERE number = NEW.number) BEGIN SELECT RAISE(ABORT, 'ledger: rows of llm_failures are never replaced'); END;
CREATE TRIGGER noise_no_delete BEFORE DELETE ON noise BEGIN SELECT RAISE(ABORT, 'ledger: rows of noise are never deleted'); END;
CREATE TRIGGER noise_no_update BEFORE UPDATE ON noise BEGIN SELECT RAISE(ABORT, 'ledger: rows of noise are never changed'); END;
CREATE TRIGGER noise_no_replace BEFORE INSERT ON noise WHEN EXISTS (SELECT 1 FROM noise WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of noise are never replaced'); END;
CREATE TRIGGER notes_no_delete BEFORE DELETE ON notes BEGIN SELECT RAISE(ABORT, 'ledger: rows of notes are never deleted'); END;
CREATE TRIGGER notes_no_update BEFORE UPDATE ON notes BEGIN SELECT RAISE(ABORT, 'ledger: rows of notes are never changed'); END;
CREATE TRIGGER notes_no_replace BEFORE INSERT ON notes WHEN EXISTS (SELECT 1 FROM notes WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of notes are never replaced'); END;
CREATE TRIGGER observations_no_delete BEFORE DELETE ON observations BEGIN SELECT RAISE(ABORT, 'ledger: rows of observations are never deleted'); END;
CREATE TRIGGER observations_no_update BEFORE UPDATE ON observations BEGIN SELECT RAISE(ABORT, 'ledger: rows of observations are never changed'); END;
CREATE TRIGGER observations_no_replace BEFORE INSERT ON observations WHEN EXISTS (SELECT 1 FROM observations WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of observations are never replaced'); END;
CREATE TRIGGER predictions_no_delete BEFORE DELETE ON predictions BEGIN SELECT RAISE(ABORT, 'ledger: rows of predictions are never deleted'); END;
CREATE TRIGGER predictions_no_update BEFORE UPDATE ON predictions BEGIN SELECT RAISE(ABORT, 'ledger: rows of predictions are never changed'); END;
CREATE TRIGGER predictions_no_replace BEFORE INSERT ON predictions WHEN EXISTS (SELECT 1 FROM predictions WHERE id = NEW.id OR registered_seq = NEW.registered_seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of predictions are never replaced'); END;
CREATE TRIGGER probe_results_no_delete BEFORE DELETE ON probe_results BEGIN SELECT RAISE(ABORT, 'ledger: rows of probe_results are never deleted'); END;
CREATE TRIGGER probe_results_no_update BEFORE UPDATE ON probe_results BEGIN SELECT RAISE(ABORT, 'ledger: rows of probe_results are never changed'); END;
CREATE TRIGGER probe_results_no_replace BEFORE INSERT ON probe_results WHEN EXISTS (SELECT 1 FROM probe_results WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of probe_results are never replaced'); END;
CREATE TRIGGER programs_no_delete BEFORE DELETE ON programs BEGIN SELECT RAISE(ABORT, 'ledger: rows of programs are never deleted'); END;
CREATE TRIGGER programs_no_update BEFORE UPDATE ON programs BEGIN SELECT RAISE(ABORT, 'ledger: rows of programs are never changed'); END;
CREATE TRIGGER programs_no_replace BEFORE INSERT ON programs WHEN EXISTS (SELECT 1 FROM programs WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of programs are never replaced'); END;
CREATE TRIGGER proposals_no_delete BEFORE DELETE ON proposals BEGIN SELECT RAISE(ABORT, 'ledger: rows of proposals are never deleted'); END;
CREATE TRIGGER proposals_no_update BEFORE UPDATE ON proposals BEGIN SELECT RAISE(ABORT, 'ledger: rows of proposals are never changed'); END;
CREATE TRIGGER proposals_no_replace BEFORE INSERT ON proposals WHEN EXISTS (SELECT 1 FROM proposals WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of proposals are never replaced'); END;
CREATE TRIGGER required_edit_states_no_delete BEFORE DELETE ON required_edit_states BEGIN SELECT RAISE(ABORT, 'ledger: rows of required_edit_states are never deleted'); END;
CREATE TRIGGER required_edit_states_no_update BEFORE UPDATE ON required_edit_states BEGIN SELECT RAISE(ABORT, 'ledger: rows of required_edit_states are never changed'); END;
CREATE TRIGGER required_edit_states_no_replace BEFORE INSERT ON required_edit_states WHEN EXISTS (SELECT 1 FROM required_edit_states WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of required_edit_states are never replaced'); END;
CREATE TRIGGER required_edits_no_delete BEFORE DELETE ON required_edits BEGIN SELECT RAISE(ABORT, 'ledger: rows of required_edits are never deleted'); END;
CREATE TRIGGER required_edits_no_update BEFORE UPDATE ON required_edits BEGIN SELECT RAISE(ABORT, 'ledger: rows of required_edits are never changed'); END;
CREATE TRIGGER required_edits_no_replace BEFORE INSERT ON required_edits WHEN EXISTS (SELECT 1 FROM required_edits WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of required_edits are never replaced'); END;
CREATE TRIGGER schema_versions_no_delete BEFORE DELETE ON schema_versions BEGIN SELECT RAISE(ABORT, 'ledger: rows of schema_versions are never deleted'); END;
CREATE TRIGGER schema_versions_no_update BEFORE UPDATE ON schema_versions BEGIN SELECT RAISE(ABORT, 'ledger: rows of schema_versions are never changed'); END;
CREATE TRIGGER schema_versions_no_replace BEFORE INSERT ON schema_versions WHEN EXISTS (SELECT 1 FROM schema_versions WHERE version = NEW.version) BEGIN SELECT RAISE(ABORT, 'ledger: rows of schema_versions are never replaced'); END;
CREATE TRIGGER screenings_no_delete BEFORE DELETE ON screenings BEGIN SELECT RAISE(ABORT, 'ledger: rows of screenings are never deleted'); END;
CREATE TRIGGER screenings_no_update BEFORE UPDATE ON screenings BEGIN SELECT RAISE(ABORT, 'ledger: rows of screenings are never changed'); END;
CREATE TRIGGER screenings_no_replace BEFORE INSERT ON screenings WHEN EXISTS (SELECT 1 FROM screenings WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of screenings are never replaced'); END;
CREATE TRIGGER verdicts_no_delete BEFORE DELETE ON verdicts BEGIN SELECT RAISE(ABORT, 'ledger: rows of verdicts are never deleted'); END;
CREATE TRIGGER verdicts_no_update BEFORE UPDATE ON verdicts BEGIN SELECT RAISE(ABORT, 'ledger: rows of verdicts are never changed'); END;
CREATE TRIGGER verdicts_no_replace BEFORE INSERT ON verdicts WHEN EXISTS (SELECT 1 FROM verdicts WHERE id = NEW.id OR seq = NEW.seq) BEGIN SELECT RAISE(ABORT, 'ledger: rows of verdicts are never replaced'); END;
CREATE TRIGGER evaluations_settle_once BEFORE UPDATE ON evaluations WHEN OLD.state <> 'reserved' BEGIN SELECT RAISE(ABORT, 'ledger: a settled evaluation is never changed'); END;
CREATE TRIGGER evaluations_settle_only BEFORE UPDATE ON evaluations WHEN NEW.state <> 'settled' OR NEW.id IS NOT OLD.id OR NEW.reserved_seq IS NOT OLD.reserved_seq OR NEW.kind IS NOT OLD.kind OR NEW.program_id IS NOT OLD.program_id OR NEW.split IS NOT OLD.split OR NEW.draw IS NOT OLD.draw OR NEW.seed IS NOT OLD.seed OR NEW.control_id IS NOT OLD.control_id OR NEW.observation_id IS NOT OLD.observation_id OR NEW.reference_artifact IS NOT OLD.reference_artifact OR NEW.turn IS NOT OLD.turn BEGIN SELECT RAISE(ABORT, 'ledger: a reserved evaluation can only be settled'); END;
CREATE TRIGGER evaluations_start_reserved BEFORE INSERT ON evaluations WHEN NEW.state <> 'reserved' BEGIN SELECT RAISE(ABORT, 'ledger: an evaluation is reserved before it is settled'); END;
CREATE TRIGGER evaluations_control_registered BEFORE INSERT ON evaluations WHEN NEW.kind = 'control' AND NOT EXISTS (SELECT 1 FROM predictions WHERE control_id = NEW.control_id AND registered_seq < NEW.reserved_seq) BEGIN SELECT RAISE(ABORT, 'ledger: a control is evaluated only after its predictions are registered'); END;
CREATE TRIGGER evaluations_within_budget BEFORE INSERT ON evaluations WHEN NEW.kind <> 'setup' AND (SELECT count(*) FROM evaluations WHERE kind <> 'setup') >= (SELECT coalesce(max(budget), 0) FROM campaign) BEGIN SELECT RAISE(ABORT, 'ledger: no evaluator call is free'); END;
CREATE TRIGGER predictions_before_control BEFORE INSERT ON predictions WHEN EXISTS (SELECT 1 FROM evaluations WHERE control_id = NEW.control_id) BEGIN SELECT RAISE(ABORT, 'ledger: this control was evaluated; what is known is never predicted'); END;
CREATE TRIGGER campaign_is_one BEFORE INSERT ON campaign WHEN EXISTS (SELECT 1 FROM campaign) BEGIN SELECT RAISE(ABORT, 'ledger: a ledger holds one campaign'); END;
CREATE VIEW budget AS SELECT total, used, reserved, total - used - reserved AS free, setup FROM (SELECT (SELECT max(budget) FROM campaign) AS total, (SELECT count(*) FROM evaluations WHERE kind <> 'setup' AND state = 'settled') AS used, (SELECT count(*) FROM evaluations WHERE kind <> 'setup' AND state = 'reserved') AS reserved, (SELECT count(*) FROM evaluations WHERE kind = 'setup') AS setup);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',63);
COMMIT;
PRAGMA application_id=1363561540;
PRAGMA user_version=2;
